"""The parts of a quantized model that a device map offloads, and a report of their precision.

Imports nothing upstream.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

from gemma4_compat._engine.io.text import runs_text, scaled_text
from gemma4_compat._gemma4.accelerate import device_maps
from gemma4_compat._gemma4.quantization.bytes import stored_bytes

#: Entries of a device map that offload. For accelerate only these strings do; ``torch.device("cpu")`` is a main
#: device.
OFFLOADED = frozenset({"cpu", "disk"})
_LOGGER = logging.getLogger("gemma4_compat")

_QUANTIZED = {"Params4bit": "4-bit", "Int8Params": "8-bit"}
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def main_accelerator(placement: Mapping[str, Any]) -> Any:
    """Where a model with this map computes, by accelerate's rule: the first entry that is not offloaded; or None."""
    return next((device for device in placement.values() if device not in OFFLOADED), None)


def device_of(name: str, placement: Mapping[str, Any]) -> str | None:
    """``"cpu"`` or ``"disk"`` if the map puts the tensor there, else None."""
    entry = device_maps.entry_for(name, placement)
    device = None if entry is None else placement[entry]
    return device if device in OFFLOADED else None


def precision(parameter: Any) -> str:
    """``"4-bit"``, ``"8-bit"``, or the usual short name of the parameter's dtype."""
    name = str(parameter.dtype).rpartition(".")[2]
    return _QUANTIZED.get(type(parameter).__name__) or _SHORT.get(name, name)


def report(model: Any, placement: Mapping[str, Any], skipped: Iterable[str]) -> None:
    """Log one line for a quantized model with offloaded parts: which of them are quantized and which are not.

    It is a warning because a warning shows without configuring ``logging``, and because a model that is bigger than
    expected and gives different outputs looks like a defect. ``skipped``: modules that the user wants unquantized.
    """
    import torch

    main = main_accelerator(placement)
    away = OFFLOADED if main is not None else {"disk"}
    found: dict[str, dict[str, int]] = {}  # bytes by block and precision
    for name, parameter in model.named_parameters():
        device = device_of(name, placement)
        if device in away:
            block = found.setdefault(_block(name, placement), {})
            block[precision(parameter)] = block.get(precision(parameter), 0) + stored_bytes(parameter)
    if not found:
        return
    parts = []
    for kind in sorted({kind for block in found.values() for kind in block}):
        names = [name for name, block in found.items() if max(block, key=lambda item: block[item]) == kind]
        total = sum(block.get(kind, 0) for block in found.values())
        parts.append(
            f"{kind} {scaled_text(total, base=1024, digits=2)}" + (f" ({', '.join(compact(names))})" if names else "")
        )
    where = "off the accelerator" if main is not None else "on disk"
    hint = ""
    if any(
        type(module) is torch.nn.Linear
        and device_of(f"{name}.weight", placement) in away
        and not any(name.startswith(entry) or name.endswith(entry) for entry in ("lm_head", *skipped))
        for name, module in model.named_modules()
    ):
        hint = "; load inside gemma4_compat.quantize(offloaded=True) to quantize their linear layers too"
    _LOGGER.warning("gemma4_compat: %s: %s%s", where, ", ".join(parts), hint)


def _block(name: str, placement: Mapping[str, Any]) -> str:
    """The part of the model that a line about ``name`` should name: a decoder layer, a tower, an embedding."""
    natural = re.match(r"(?:.*?\blayers\.\d+|(?:model\.)?(?:language_model\.)?[^.]+)(?=\.|$)", name)
    entry = device_maps.entry_for(name, placement) or ""
    tower = re.match(r"(?:model\.)?(?:vision|audio)_tower", name)
    part = tower.group() if tower else natural.group() if natural else name
    return entry if len(entry) > len(part) else part


def compact(names: Iterable[str]) -> list[str]:
    """Names with runs of numbers joined: ``layers.0``, ``layers.1`` and ``layers.2`` become ``layers.0-2``."""
    numbers: dict[str, list[int]] = {}
    others: list[str] = []
    for name in names:
        stem, _, last = name.rpartition(".")
        if last.isdigit():
            numbers.setdefault(stem, []).append(int(last))
        else:
            others.append(name)
    return [f"{stem}.{runs_text(sorted(found), ',')}" for stem, found in numbers.items()] + others
