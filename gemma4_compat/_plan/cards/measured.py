"""Cards that were measured: reports of ``gemma4-compat check`` in ``measured_cards``, and what a plan takes of them.

A file is a report of one model on one card, from somebody's machine or from a benchmark of this repository (its
``source`` says which). A measured rate counts only for the same model, stored in the same way, in the same placement;
towers may be anywhere, because no step of decoding runs them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemma4_compat._engine.io import json_files

FOLDER = Path(__file__).with_name("measured_cards")
#: Words that a card's name may have after those that people write: its memory.
_MEMORY = re.compile(r"(\s+(\d+ ?gb|hbm\w*))*")


@dataclass(frozen=True, kw_only=True)
class Key:
    """What must be the same for a measured rate to be that of a plan.

    Attributes:
        layers: of the text model.
        hidden: its width.
        vocabulary: its tokens.
        quantization: as ``plan`` names it.
        quantized_experts: experts are in 4 bits.
        away: parts that are off the card, from :func:`away`.
        adapter: an adapter is loaded.
    """

    layers: int
    hidden: int
    vocabulary: int
    quantization: str | None
    quantized_experts: bool
    away: Mapping[str, int]
    adapter: bool


def away(device_map: Mapping[str, Any]) -> dict[str, int]:
    """How many parts of a map are off the card: ``per_layer_embeddings``, ``embeddings``, ``towers``, ``layers``, and
    ``experts`` of layers that stay.
    """
    found = dict.fromkeys(("per_layer_embeddings", "embeddings", "towers", "layers", "experts"), 0)
    for name, device in device_map.items():
        if device in ("cpu", "disk"):
            found[_part(name)] += 1
    return found


def title(parts: Mapping[str, int]) -> str:
    """What is off the card, in words."""
    words = {"per_layer_embeddings": "per-layer embeddings", "embeddings": "embeddings"}
    said = [words[name] for name in words if parts[name]]
    said += [f"{parts['towers']} tower" + "s" * (parts["towers"] > 1)] if parts["towers"] else []
    said += [f"experts of {parts['experts']} layers"] if parts["experts"] else []
    said += [f"{parts['layers']} layers"] if parts["layers"] else []
    return f"in host memory: {', '.join(said)}" if said else "everything on the card"


def read(data: bytes, name: str) -> Any:
    """A report, as ``card_report.Report``.

    Raises:
        Gemma4CompatError: it does not have the form of one.
    """
    from gemma4_compat._plan.cards.card_report import Report

    return json_files.of_format(data, Report, f"{name!r} is no report of `gemma4-compat check`")


@functools.cache
def reports() -> tuple[Any, ...]:
    """Those of this package, the newest first."""
    found = [read(file.read_bytes(), file.name) for file in sorted(FOLDER.glob("*.json"))]
    return tuple(sorted(found, key=lambda report: str(report.date), reverse=True))


def of_card(name: str) -> list[Any]:
    """The reports from a card, by the name that the driver gives it or a user writes."""
    return [report for report in reports() if report.machine.gpu is not None and _same(report.machine.gpu.name, name)]


def rate(name: str, key: Key, context: int) -> tuple[float, int] | None:
    """Tokens per second of replayed steps on a card, and after how many tokens that was; None if nobody measured it.

    Several measurements: the one whose context is nearest, then the newest.
    """
    found = [item for report in of_card(name) for item in _rates(report, key)]
    return min(found, key=lambda item: max(item[1] / context, context / item[1]), default=None)


def bus(name: str) -> int:
    """Bytes per second of a copy from pinned host memory to a card, as measured; 0 if nobody measured it."""
    return next((report.machine.copies.pinned for report in of_card(name) if report.machine.copies.pinned), 0)


def _rates(report: Any, key: Key) -> Iterator[tuple[float, int]]:
    model = report.model
    same = (model.layers, model.hidden, model.vocabulary) == (key.layers, key.hidden, key.vocabulary)
    stored = (model.quantization, model.quantized_experts) == (key.quantization, key.quantized_experts)
    if not (same and stored):
        return
    for placement in report.placements:
        if _decoding(placement.away) == _decoding(key.away) and not placement.merged and not placement.failures:
            for speed in placement.speeds:
                if speed.adapter == key.adapter and speed.fast_tokens_s is not None:
                    yield speed.fast_tokens_s, speed.context


def _decoding(parts: Mapping[str, int]) -> dict[str, int]:
    """The parts that a step of decoding needs."""
    return {name: count for name, count in parts.items() if name != "towers"}


def _same(driver: str, name: str) -> bool:
    """Whether the driver's name of a card is what a user calls ``name``."""
    full, wanted = _plain(driver), _plain(name)
    return full == wanted or (full.startswith(wanted) and bool(_MEMORY.fullmatch(full[len(wanted) :])))


def _plain(name: str) -> str:
    return " ".join(name.split()).casefold().removeprefix("nvidia ").removeprefix("geforce ")


def _part(name: str) -> str:
    if name.endswith(".experts"):
        return "experts"
    if ".layers." in name:
        return "layers"
    if name.endswith("embed_tokens_per_layer"):
        return "per_layer_embeddings"
    return "embeddings" if name.endswith(("embed_tokens", "lm_head")) else "towers"
