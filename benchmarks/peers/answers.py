"""How close a peer's answer is to that of the same weights in bf16. Needs NumPy alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.common import Data


def save(folder: Path, prompt: list[int], logits: Any) -> None:
    """The prompt that every peer is given, and what bf16 says of each of its positions."""
    import numpy

    (folder / "prompt.json").write_text(json.dumps(prompt), encoding="utf-8")
    numpy.save(folder / "reference.npy", logits)


def prompt(folder: Path) -> list[int]:
    found: list[int] = json.loads((folder / "prompt.json").read_text(encoding="utf-8"))
    return found


def compared(folder: Path, logits: Any) -> Data:
    """The share of positions with the same likeliest token, the mean KL divergence from bf16 in nats, and by how much
    a logit differs at most, as a share of the logits' spread.
    """
    import numpy

    expected = numpy.load(folder / "reference.npy", mmap_mode="r")
    same, divergences, apart = [], [], []
    for one, other in zip(expected, logits, strict=True):
        theirs, own = _log_softmax(one), _log_softmax(other)
        same.append(float(one.argmax() == other.argmax()))
        divergences.append(float((numpy.exp(theirs) * (theirs - own)).sum()))
        apart.append(float(numpy.abs(one - other).max() / one.std()))
    return {
        "same_token": sum(same) / len(same),
        "divergence": sum(divergences) / len(divergences),
        "apart": max(apart),
        "positions": len(same),
    }


def _log_softmax(row: Any) -> Any:
    import numpy

    shifted = row.astype(numpy.float64) - float(row.max())
    return shifted - numpy.log(numpy.exp(shifted).sum())
