"""The parts of ``train_fast`` other than graphs: which of them a call turns on, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gemma4_compat._engine.io.text import size_text
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4 import host
from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat._gemma4.attention import windows
from gemma4_compat._gemma4.models import walk
from gemma4_compat._training import loss, mlp
from gemma4_compat._training.captured import layers

#: Bytes that a step leaves free: neither fragmentation nor what kernels use internally is counted. In plans as well.
MARGIN = 1 << 29
#: Bytes of a token in the layer that goes backward, in 16 bits: for each unit of its MLP, of its hidden states, and of
#: the per-layer inputs of all layers. Fitted to steps that plans ran (tests/unit/training/test_parts.py).
_OF_MLP, _OF_HIDDEN, _OF_PER_LAYER = 14, 50, 7
_AUTO, _ALWAYS = "auto", "always"
_IDS = {"loss": loss.ID, "mlp": mlp.ID, "windows": windows.ID, "products": windows.ID}
_SAID = {
    "loss": "the loss in chunks (outputs.logits is None)",
    "mlp": "MLPs in chunks",
    "windows": "sliding layers by windows",
    "products": "attention by products",
}


@dataclass
class Chosen:
    """What is turned on.

    Attributes:
        on: the parts.
        off: why "auto" left others off.
        is_short: memory asked for MLPs in chunks.
    """

    on: set[str] = field(default_factory=set)
    off: list[str] = field(default_factory=list)
    is_short: bool = False

    @property
    def said(self) -> list[str]:
        """The parts in words."""
        return [words for part, words in _SAID.items() if part in self.on]


def chosen(model: Any, max_tokens: int, named: Mapping[str, Any]) -> Chosen:
    """What to turn on. Changes nothing.

    Raises:
        Gemma4CompatError: a part that is asked for cannot be had, or its value makes no sense.
    """
    found = Chosen()
    for part, value in named.items():
        if not _makes_sense(part, value):
            raise Gemma4CompatError(f'train_fast got {part}={value!r}; it is "auto", {_others(part)}True or False')
        if value is False:
            continue
        asks, why = needs_chunks(model, max_tokens) if (part, value) == ("mlp", _AUTO) else (True, "")
        why = why if not asks else _unavailable(part, model) or ""
        if not why:
            found.on.add(part)
            found.is_short |= (part, value) == ("mlp", _AUTO)
        elif value == _AUTO:
            found.off.append(f"not {_SAID[part].partition(' (')[0]}: {why}")
        else:
            raise Gemma4CompatError(
                f"train_fast got {part}={value!r}, but {why}; gemma4_compat.status()[{_IDS[part]!r}] says more"
            )
    return found


def _makes_sense(part: str, value: Any) -> bool:
    if part == "mlp" and isinstance(value, int) and not isinstance(value, bool):
        return value > 0
    return isinstance(value, bool) or value == _AUTO or (part == "loss" and value == _ALWAYS)


def _others(part: str) -> str:
    return {"loss": '"always", ', "mlp": "a number of tokens from 1 on, "}.get(part, "")


def _unavailable(part: str, model: Any) -> str | None:
    if part in ("windows", "products"):
        return windows.unavailable()
    return loss.unavailable(model) if part == "loss" else mlp.unavailable(model)


def ask(model: Any, found: Chosen, named: Mapping[str, Any]) -> None:
    """Mark a model for the parts that are on, and as left alone for those that are named off."""
    if "loss" in found.on:
        loss.ask(model, evaluation=named["loss"] == _ALWAYS)
    elif named["loss"] is False:
        loss.leave(model)
    if "mlp" in found.on:
        mlp.ask(model, None if named["mlp"] == _AUTO or named["mlp"] is True else named["mlp"])
    elif named["mlp"] is False:
        mlp.leave(model)
    windows.ask(model, windows="windows" in found.on, products="products" in found.on)


def forget(model: Any) -> None:
    """Take all marks off a model; GEMMA4_COMPAT_ENABLE decides."""
    loss.forget(model)
    mlp.forget(model)
    windows.forget(model)


def needs_chunks(model: Any, tokens: int) -> tuple[bool, str]:
    """Whether MLPs should be computed in chunks in steps of so many tokens; and why not."""
    if tokens <= mlp.TOKENS:
        return False, f"{tokens:,} tokens are one chunk"
    layer = layers.decoder_layers(model)[0]
    device = module_hooks.hook_device(layer.input_layernorm) or layer.input_layernorm.weight.device
    if getattr(layer, "enable_moe_block", False):
        return False, "experts take more, and are never in chunks"
    needed, free = step(model, tokens), host.free_memory(device)
    if free is None:
        return False, f"the model is on {device}"
    if needed + MARGIN <= free:
        return False, f"a step of {tokens:,} tokens takes about {size_text(needed)}, and {size_text(free)} are free"
    return True, ""


def step(model: Any, tokens: int) -> int:
    """Bytes of a step with checkpointing: checkpoints, the widest layer, gradients and Adam's states."""
    found = layers.decoder_layers(model)
    hidden, per_layer = found[0].hidden_size, getattr(found[0], "hidden_size_per_layer_input", 0) or 0
    of_layer = _OF_MLP * max(layer.mlp.gate_proj.out_features for layer in found) + _OF_HIDDEN * hidden
    of_token = len(found) * (2 * hidden + _OF_PER_LAYER * per_layer) + of_layer
    trained = sum(weight.nbytes for weight in model.parameters() if weight.requires_grad)
    item = int(walk.unwrapped(model).dtype.itemsize)
    return tokens * int(of_token) * item // 2 + 3 * int(trained)
