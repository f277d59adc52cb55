"""What long contexts take of a card, and the table of that in docs/CACHES.md.

``python -m tools.pages.contexts`` writes the table, from the planner's arithmetic for the installed transformers.
"""

from __future__ import annotations

from collections.abc import Iterator

from gemma4_compat._models import build, variants
from gemma4_compat._planner import layout, memory
from gemma4_compat._planner.blueprint import Blueprint, describe
from gemma4_compat._planner.memory import Load
from gemma4_compat._quantization import config
from tools.pages.markers import ROOT, between

PAGE = ROOT / "docs" / "CACHES.md"
START, END = "<!-- contexts: start (python -m tools.pages.contexts) -->", "<!-- contexts: end -->"
#: The transformers of the figures.
RELEASE = "5.24.0"
CONTEXTS = (8192, 32_768, 131_072)
_HEAD = ("variant", "tokens", "keys and values", "all layers and experts on the card", "in host memory what can be")


def table() -> str:
    """In GiB: keys and values, and the smallest budgets, for weights and experts in 4 bits."""
    rows = [f"| {' | '.join(_HEAD)} |", "|---|---|---|---|---|"]
    for variant in variants.NAMES:
        model = build.on_meta(variant)[0]
        names = config.linear_names(model, config.default_skip_modules(model))
        rows += _rows(variant, describe(model, "4bit", names, experts=True))
    return "\n".join(rows)


def _rows(variant: str, blueprint: Blueprint) -> Iterator[str]:
    for context in CONTEXTS:
        load = Load(context=context, prefill_chunk=layout.PREFILL_CHUNK, fast=True)
        kept = sum(memory.kv_cache(block, load, blueprint.item, prefill=False) for block in blueprint.layers)
        stay, leave = (layout.smallest_budget(blueprint, load, layers_leave=leave) for leave in (False, True))
        figures = (f"{nbytes / 2**30:.{digits}f}" for nbytes, digits in ((kept, 2), (stay, 1), (leave, 1)))
        yield f"| {variant} | {context:,} | {' | '.join(figures)} |"


def page(text: str) -> str:
    """``text`` with the table as it should be."""
    return between(text, START, END, table())


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
