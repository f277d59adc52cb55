"""The parts of ``train_fast`` other than graphs: which of them a call turns on, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gemma4_compat._attention import windows
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._fast_training import room
from gemma4_compat._training import loss, mlp

_AUTO, _ALWAYS = "auto", "always"
_IDS = {"loss": loss.ID, "mlp": mlp.ID, "windows": windows.ID, "products": windows.ID}
_SAID = {
    "loss": "the loss in chunks (outputs.logits is None)",
    "mlp": "MLPs in pieces",
    "windows": "sliding layers by windows",
    "products": "full layers by products",
}


@dataclass
class Chosen:
    """What is turned on.

    Attributes:
        on: the parts.
        off: why "auto" left others off.
        is_short: memory asked for MLPs in pieces.
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
        asks, why = room.asks_for_pieces(model, max_tokens) if (part, value) == ("mlp", _AUTO) else (True, "")
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
        mlp.ask(model, None if named["mlp"] in (_AUTO, True) else named["mlp"])
    elif named["mlp"] is False:
        mlp.leave(model)
    windows.ask(model, windows="windows" in found.on, products="products" in found.on)


def forget(model: Any) -> None:
    """Take all marks off a model; GEMMA4_COMPAT_ENABLE decides."""
    loss.forget(model)
    mlp.forget(model)
    windows.forget(model)
