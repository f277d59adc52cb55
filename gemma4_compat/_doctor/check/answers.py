"""What a model answers to a prompt, and whether that is bit by bit what was answered before."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gemma4_compat._doctor.check.prompts import Prompt
from gemma4_compat._engine.patch import FORWARDS
from gemma4_compat._gemma4.models import random_inputs

#: Positions of a prompt whose logits are compared, the last ones.
_POSITIONS = 16


def of(model: Any, prompt: Prompt, new: int, suppress: list[int]) -> dict[str, Any]:
    """Logits of :data:`FORWARDS` forwards (the last :data:`_POSITIONS` positions), then :func:`generated`.

    Several wrong repairs pass the first forward.
    """
    import torch

    found = {}
    batch = random_inputs.on(model, prompt.batch)
    with torch.no_grad():
        for number in range(FORWARDS):
            found[f"forward {number + 1}"] = model(**batch, logits_to_keep=_POSITIONS).logits.cpu()
    return found | generated(model, prompt, new, suppress)


def generated(model: Any, prompt: Prompt, new: int, suppress: list[int], **options: Any) -> dict[str, Any]:
    """``new`` greedy ``tokens``, shape (``new``,), and the ``logits`` they are chosen from, shape (``new``,
    vocabulary): what may not be chosen is minus infinity.
    """
    import torch
    from transformers import LogitsProcessorList

    kept = _Kept()
    with torch.no_grad():
        tokens = model.generate(
            **random_inputs.on(model, prompt.batch),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            suppress_tokens=suppress or None,
            logits_processor=LogitsProcessorList([kept]),
            **options,
        )
    return {"logits": torch.stack(kept.logits), "tokens": tokens[0, prompt.batch["input_ids"].shape[1] :].cpu()}


class _Kept:
    """A logits processor that only copies. ``generate`` keeps logits on the GPU, which no plan counts."""

    def __init__(self) -> None:
        self.logits: list[Any] = []

    def __call__(self, _ids: Any, scores: Any) -> Any:
        self.logits.append(scores[0].cpu())
        return scores


def compared(reference: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """How two answers differ.

    Returns:
        ``equal`` (as bits), ``difference`` (the largest of logits; infinite for another shape or a NaN), ``tokens``
        and ``tokens_equal`` (how many before the first other one), ``first`` (what differs first, or None).
    """
    import torch

    largest, first = 0.0, None
    for name, one in reference.items():
        two = other[name]
        if one.shape == two.shape and one.dtype == two.dtype and torch.equal(_bits(one), _bits(two)):
            continue
        first = first or name
        if name != "tokens":
            apart = _apart(one.float(), two.float()) if one.shape == two.shape else math.inf
            largest = max(largest, apart)
    tokens, others = reference["tokens"], other["tokens"]
    same = tokens[: len(others)] == others[: len(tokens)]
    return {
        "equal": first is None,
        "difference": largest,
        "tokens": len(tokens),
        "tokens_equal": int(same.long().cumprod(0).sum()),
        "first": first,
    }


def _apart(one: Any, two: Any) -> float:
    """The largest difference: infinite for a NaN, zero between equal infinities."""
    differences = (one - two).abs().masked_fill(one == two, 0.0)
    largest = float(differences.max())
    return math.inf if math.isnan(largest) else largest


def finite(answer: Mapping[str, Any]) -> bool:
    """Whether no logit is NaN or infinite; minus infinity among those of ``generate`` is what it may not choose."""
    bad = (value.isnan() | value.isposinf() for name, value in answer.items() if name == "logits")
    infinite = (~value.isfinite() for name, value in answer.items() if name.startswith("forward"))
    return not any(bool(found.any()) for found in (*bad, *infinite))


def digest(answer: Mapping[str, Any]) -> str:
    """Sixteen hexadecimal digits that another run has if and only if it has the same bits."""
    found = hashlib.sha256()
    for name, value in answer.items():
        found.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        found.update(_bits(value).numpy().tobytes())
    return found.hexdigest()[:16]


class Store:
    """The answers of the placements that ran before, in a folder; the first answer of each key is the reference."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def compare(self, key: str, answer: Mapping[str, Any]) -> dict[str, Any] | None:
        """How an answer differs from the reference of this key; None if it becomes the reference."""
        from safetensors.torch import load_file, save_file

        file = self._folder / f"{key.replace(' ', '-')}.safetensors"
        if file.exists():
            return compared(load_file(file), answer)
        unfinished = file.with_suffix(".unfinished")
        save_file({name: value.contiguous() for name, value in answer.items()}, unfinished)
        unfinished.replace(file)
        return None


def _bits(value: Any) -> Any:
    import torch

    return value.contiguous().view(torch.uint8) if value.is_floating_point() else value
