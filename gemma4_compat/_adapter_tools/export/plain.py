"""A saved LoRA in the form that every reader supports: two matrices per module, with one rank and one scale.

PEFT itself determines the modules, ranks and scales: it makes the adapter on the meta device from the same
configuration as when it loads it. Modules of a smaller rank get zeros, which is exact. If a module's scale differs
from that of most others, its ``lora_B`` is multiplied by the quotient, in float32, and rounded once.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.adapters import fitting, translation
from gemma4_compat._gemma4.adapters.saved import REFUSALS, SavedAdapter, first_line
from gemma4_compat._gemma4.adapters.translation import PREFIX
from gemma4_compat._gemma4.checkpoint import shards
from gemma4_compat._gemma4.checkpoint.shards import Entry

#: Values of ``init_lora_weights`` for which loading the adapter changes no weight of the base.
_NEUTRAL_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
#: ``transformers.conversion_mapping``, "gemma4_unified", reversed.
_RENAMED = {
    "embed_vision.patch_dense": "vision_embedder.patch_dense",
    "embed_vision.multimodal_embedder.": "embed_vision.",
}
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Module:
    """One adapted module, or one adapted parameter of all experts of a layer.

    Attributes:
        path: in the base model.
        name: in a checkpoint, without leading containers, such as ``layers.0.self_attn.q_proj``.
        kind: "linear", "embedding" or "experts".
        parameter: for experts, "gate_up_proj" or "down_proj".
        a: of shape ``(rank, in)``; for an embedding ``(rank, rows)``; for experts ``(rank * experts, in)``.
        b: of shape ``(out, rank)``; for experts ``(out, rank * experts)``, experts innermost.
        magnitude: DoRA's, of shape ``(out,)``.
        rank: of this module.
        scale: factor for ``B @ A``.
        experts: number of experts; 1 for a module.
    """

    path: str
    name: str
    kind: str
    parameter: str
    a: Entry
    b: Entry
    magnitude: Entry | None
    rank: int
    scale: float
    experts: int = 1

    @property
    def where(self) -> str:
        """The path, with the parameter."""
        return f"{self.path}.{self.parameter}" if self.parameter else self.path

    @property
    def wide(self) -> int:
        """Inputs of the module."""
        return self.a.shape[1]

    @property
    def tall(self) -> int:
        """Outputs of the module."""
        return self.b.shape[0]


@dataclass(frozen=True)
class Plain:
    """A plain LoRA or DoRA adapter.

    Attributes:
        modules: in the order of the model.
        rank: the largest of all modules.
        scale: that of most modules.
        dora: whether there are magnitudes.
        invocation: tokens after which an activated LoRA starts; empty for any other.
    """

    modules: tuple[Module, ...]
    rank: int
    scale: float
    dora: bool
    invocation: tuple[int, ...]

    def rescaled(self) -> tuple[Module, ...]:
        """Modules whose ``lora_B`` is multiplied by another scale."""
        return tuple(module for module in self.modules if module.scale != self.scale)

    def padded(self) -> tuple[Module, ...]:
        """Modules of a smaller rank, which get zeros."""
        return tuple(module for module in self.modules if module.rank != self.rank)

    def shapes(self, module: Module) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of :meth:`read_a` and :meth:`read_b`."""
        experts = (module.experts,) if module.kind == "experts" else ()
        return (*experts, self.rank, module.wide), (*experts, module.tall, self.rank)

    def read_a(self, module: Module, read: Callable[[Entry], Any]) -> Any:
        """``lora_A``, of shape ``(rank, in)``; for experts ``(experts, rank, in)``."""
        import torch

        tensor = read(module.a)
        if module.kind == "experts":
            tensor = tensor.reshape(module.experts, module.rank, module.wide)
        return torch.nn.functional.pad(tensor, (0, 0, 0, self.rank - module.rank)).contiguous()

    def read_b(self, module: Module, read: Callable[[Entry], Any]) -> Any:
        """``lora_B``, of shape ``(out, rank)``; for experts ``(experts, out, rank)``."""
        import torch

        tensor = read(module.b)
        if module.scale != self.scale:
            tensor = (tensor.float() * (module.scale / self.scale)).to(tensor.dtype)
        if module.kind == "experts":
            tensor = tensor.reshape(module.tall, module.rank, module.experts).permute(2, 0, 1)
        return torch.nn.functional.pad(tensor, (0, self.rank - module.rank)).contiguous()


def read(saved: SavedAdapter, config: Any, entries: Mapping[str, Entry], model: Any, reader: str) -> Plain:
    """The adapter as plain LoRA.

    Args:
        saved: the adapter.
        config: its PEFT configuration, fitted to ``model``.
        entries: its tensors by the keys PEFT uses for this model.
        model: the base on the meta device; PEFT puts the adapter into it.
        reader: the program that will read it, for messages.

    Raises:
        Gemma4CompatError: it is more than a LoRA; the message says why and what to do instead.
    """
    _refuse_settings(config, reader)
    layers = _layers(config, saved, model)
    found = [_module(name, layer, entries, reader) for name, layer in layers.items()]
    parts = [module for module in found if module is not None]
    _refuse_leftovers(entries, parts, reader)
    if not parts:
        raise Gemma4CompatError(
            f"the adapter in {str(saved.folder)!r} has no LoRA weights; there is nothing to export"
        )
    scales = Counter(module.scale for module in parts)
    plain = Plain(
        tuple(parts),
        max(module.rank for module in parts),
        scales.most_common(1)[0][0],
        any(module.magnitude is not None for module in parts),
        tuple(getattr(config, "alora_invocation_tokens", None) or ()),
    )
    if not plain.scale:
        raise Gemma4CompatError(f"lora_alpha is 0 in {str(saved.folder)!r}: the adapter does nothing")
    return plain


def instead(reader: str) -> str:
    """What to do with an adapter that a reader does not support."""
    return f"Merge it, which {reader} reads as a model: gemma4-compat merge BASE ADAPTER OUT"


def _refuse_settings(config: Any, reader: str) -> None:
    kind = getattr(config.peft_type, "value", config.peft_type)
    if kind != "LORA":
        raise Gemma4CompatError(f"{reader} reads only LoRA adapters, and this one is {kind}. {instead(reader)}")
    init = getattr(config, "init_lora_weights", True)
    reasons = {
        "modules_to_save": "it has trained copies of whole modules (modules_to_save)",
        "trainable_token_indices": "it has trained rows of embeddings (trainable_token_indices)",
        "layer_replication": "it replicates layers (layer_replication), which gives another architecture",
        "lora_bias": "its LoRA layers have biases (lora_bias)",
    }
    found = [reason for name, reason in reasons.items() if getattr(config, name, None)]
    if getattr(config, "bias", "none") != "none":
        found.append(f"it has trained biases (bias={config.bias!r})")
    if isinstance(init, str) and init.lower() not in _NEUTRAL_INITS:
        found.append(f"PEFT changes the base's weights when it loads it (init_lora_weights={init!r})")
    if found:
        raise Gemma4CompatError(f"{reader} cannot use this adapter: {found[0]}. {instead(reader)}")


def _layers(config: Any, saved: SavedAdapter, model: Any) -> dict[str, Any]:
    """PEFT's LoRA layers by path, on the meta device."""
    import peft
    from peft.tuners.lora.layer import LoraLayer

    config = copy.deepcopy(config)
    config.init_lora_weights = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with fitting.loading(saved.folder, tuple(saved.tensors)):
                adapted = peft.get_peft_model(model, config, low_cpu_mem_usage=True)
        except REFUSALS as error:
            raise Gemma4CompatError(
                f"PEFT {peft.__version__} refuses the adapter in {str(saved.folder)!r}: {first_line(error)}"
            ) from error
    inner = adapted.base_model.model.named_modules()
    return {name: layer for name, layer in inner if isinstance(layer, LoraLayer)}


def _module(name: str, layer: Any, entries: Mapping[str, Entry], reader: str) -> Module | None:
    """The weights of one of PEFT's layers; None if the file has none."""
    (adapter,) = layer.r
    parameter = getattr(layer, "parameter_name", "")
    kind = "embedding" if layer.lora_embedding_A else "experts" if parameter else "linear"
    halves = [f"{PREFIX}{name}.lora_{'embedding_' * (kind == 'embedding')}{half}" for half in "AB"]
    if kind != "embedding":
        halves = [f"{half}.weight" for half in halves]
    there = [key for key in halves if key in entries]
    if not there:
        return None
    if len(there) == 1:
        raise Gemma4CompatError(f"the file has {there[0]!r} but not the other half of that layer: it is incomplete")
    a, b = (entries[key] for key in halves)
    if kind == "embedding":
        wanted = [layer.lora_embedding_A[adapter].shape, layer.lora_embedding_B[adapter].shape]
    else:
        wanted = [layer.lora_A[adapter].weight.shape, layer.lora_B[adapter].weight.shape]
    for entry, shape in zip((a, b), wanted):
        _refuse_other_tensor(entry, tuple(shape))
    _refuse_variant(name, layer, adapter, reader)
    path = re.sub(r"(\.base_layer)+$", "", name)
    return Module(
        path=path,
        name=_released(".".join(translation.shared_part(path))),
        kind=kind,
        parameter=parameter,
        a=a,
        b=b,
        magnitude=entries.get(f"{PREFIX}{name}.lora_magnitude_vector"),
        rank=layer.r[adapter],
        scale=layer.scaling[adapter],
        experts=layer.num_experts if parameter else 1,
    )


def _released(name: str) -> str:
    """The checkpoint's name of a module in the 12B's embedders; readers keep that name, transformers renames it."""
    for here, there in _RENAMED.items():
        if name.startswith(here):
            return there + name[len(here) :]
    return name


def _refuse_other_tensor(entry: Entry, shape: tuple[int, ...]) -> None:
    if entry.shape != shape:
        raise Gemma4CompatError(
            f"{entry.name!r} is {list(entry.shape)} instead of {list(shape)}: the adapter was made for another base, "
            "or its configuration belongs to another adapter. Give the base it was trained on (--base)"
        )
    if entry.dtype not in _DTYPES:
        raise Gemma4CompatError(
            f"{entry.name!r} has the dtype {entry.dtype}; only {', '.join(_DTYPES)} can be exported"
        )


def _refuse_variant(name: str, layer: Any, adapter: str, reader: str) -> None:
    """Refuse layers that do not compute ``x @ A @ B``. Readers handle DoRA and activated LoRA themselves."""
    variant = type(layer.lora_variant[adapter]).__name__ if adapter in layer.lora_variant else ""
    if variant and not variant.startswith(("Dora", "ALora")):
        raise Gemma4CompatError(
            f"{reader} cannot use this adapter: {name!r} is a variant of LoRA ({variant}). {instead(reader)}"
        )
    base = layer.get_base_layer()
    if hasattr(base, "kernel_size"):
        raise Gemma4CompatError(
            f"{reader} cannot use this adapter: {name!r} is a convolution ({type(base).__name__}). {instead(reader)}"
        )


def _refuse_leftovers(entries: Mapping[str, Entry], parts: list[Module], reader: str) -> None:
    used = {entry.name for part in parts for entry in (part.a, part.b, part.magnitude) if entry is not None}
    left = [key for key, entry in entries.items() if entry.name not in used]
    if not left:
        return
    if any(".lora_" in key for key in left):
        key = next(key for key in left if ".lora_" in key)
        raise Gemma4CompatError(
            f"the file has weights for {key!r}, which its configuration does not target: PEFT drops them. The two "
            "files do not belong to the same adapter; get both again"
        )
    raise Gemma4CompatError(
        f"{reader} cannot use this adapter: {len(left)} of its tensors are whole weights, such as {left[0]!r}. "
        f"{instead(reader)}"
    )


def cached_reader() -> Callable[[Entry], Any]:
    """A ``shards.read`` that keeps the last tensor, because tensors of experts are read once per expert."""
    last: dict[str, Any] = {}

    def read_once(entry: Entry) -> Any:
        if entry.name not in last:
            last.clear()
            last[entry.name] = shards.read(entry)
        return last[entry.name]

    return read_once
