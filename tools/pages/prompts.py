"""The measured part of docs/DECODING.md about prompts."""

from __future__ import annotations

import json
from typing import Any

from tools.pages.markers import ROOT

_RAW = "benchmarks/results/2026-11-27-h100/prompts-E2B.json"
_WAYS = {
    "default": "`generate`",
    "at_once": "`decode_fast`, at once",
    "any_length": "`any_length=True`",
    "llama.cpp": "llama.cpp, Q4_0",
}


def prompts() -> str:
    """Milliseconds to the first token by the length of the prompt, and GiB above the loaded model."""
    lengths: dict[str, Any] = json.loads((ROOT / _RAW).read_text(encoding="utf-8"))["lengths"]
    rows = [
        f"| {int(length):,} tokens | " + " | ".join(_cell(found, way) for way in _WAYS) + " |"
        for length, found in lengths.items()
    ]
    return "\n".join(("| prompt | " + " | ".join(_WAYS.values()) + " |", "|---" * (1 + len(_WAYS)) + "|", *rows))


def _cell(found: dict[str, Any], way: str) -> str:
    summary, peak = found["summary"][way], found["peak"].get(way)
    once = " (one try)" if summary["of"] == 1 else ""
    return f"{summary['median']:.1f}{once}" + ("" if peak is None else f", {peak:.2f} GiB")
