"""What long contexts take of a card: the table in docs/CACHES.md, and what is planned for those that were measured.

``python -m tools.pages.contexts`` writes the table, and ``benchmarks/results/planned_contexts.json`` for the table in
docs/DECODING_MEASURED.md, from the planner's arithmetic for the installed transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gemma4_compat._gemma4.models import build, variants
from gemma4_compat._gemma4.quantization import config
from gemma4_compat._generation.prompts import chunks
from gemma4_compat._memory import formulas, layout, use
from gemma4_compat._memory.blueprint import Blueprint, describe
from gemma4_compat._memory.formulas import Load
from tools.pages.markers import ROOT, between

PAGE = ROOT / "docs" / "CACHES.md"
START, END = "<!-- contexts: start (python -m tools.pages.contexts) -->", "<!-- contexts: end -->"
#: The transformers of the figures.
RELEASE = "5.24.0"
CONTEXTS = (8192, 32_768, 131_072)
#: Measured by benchmarks/small_card/contexts.py, and what is planned for them.
MEASURED = ROOT / "benchmarks" / "results" / "2026-11-27-h100"
PLANNED = ROOT / "benchmarks" / "results" / "planned_contexts.json"
SHAPES = ("E2B", "E4B", "26B-A4B")
#: Tokens of the answer, which the benchmark did not note.
_NEW = 128
_HEAD = ("variant", "tokens", "keys and values", "all layers and experts on the card", "in host memory what can be")


def table() -> str:
    """In GiB: keys and values, and the smallest budgets, for weights and experts in 4 bits; these with PyTorch's
    attention as well.
    """
    head = (*_HEAD, *(f"{title}, PyTorch's attention" for title in _HEAD[3:]))
    rows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for variant in variants.NAMES:
        model = build.on_meta(variant)[0]
        names = config.linear_names(model, config.default_skip_modules(model))
        rows += _rows(variant, describe(model, "4bit", names, experts=True))
    return "\n".join(rows)


def _rows(variant: str, blueprint: Blueprint) -> Iterator[str]:
    for context in CONTEXTS:
        load = Load(context=context, prefill_chunk=layout.PREFILL_CHUNK, fast=True, own_in_chunks=True)
        kept = sum(formulas.kv_cache(block, load, blueprint.item, prefill=False) for block in blueprint.layers)
        least = (
            layout.smallest_budget(blueprint, one, layers_leave=leave)
            for one in (load, replace(load, own_in_chunks=False))
            for leave in (False, True)
        )
        figures = (f"{nbytes / 2**30:.1f}" for nbytes in least)
        yield f"| {variant} | {context:,} | {kept / 2**30:.2f} | {' | '.join(figures)} |"


def measured(shape: str) -> dict[str, Any]:
    """What benchmarks/small_card/contexts.py found."""
    found: dict[str, Any] = json.loads((MEASURED / f"contexts-{shape}.json").read_text(encoding="utf-8"))
    return found


def planned(shape: str, *, own: bool = True) -> dict[str, Any]:
    """The chunk, and the bytes at most, that are planned for a measured context: its placement, its budget.

    Args:
        shape: of the benchmark.
        own: whether this package's kernels compute attention.
    """
    run, model = measured(shape), build.on_meta(shape)[0]
    names = config.linear_names(model, config.default_skip_modules(model))
    if shape == "26B-A4B":  # made layer by layer, with a tower in bf16
        names = frozenset(name for name in names if ".language_model.layers." in name)
    blueprint = describe(model, "4bit-double", names, experts=True)
    # The table and towers are on the host, or only all experts.
    apart = [block for block in blueprint.layers if block.experts_stored is not None]
    away = [] if apart else [block for block in blueprint.blocks if block.kind in ("tower", "per_layer_embedding")]
    resident = [block for block in blueprint.blocks if block not in away]
    share = use.Share(resident=resident, looked_up=apart, evicted=away)
    prompt = run["tokens"] - _NEW
    budget = int(run["budget_gib"] * 2**30)
    load = Load(context=run["tokens"], prompt=prompt, fast=True, own_in_chunks=own)

    def peak(chunk: int) -> int:
        # Of the head there was no copy when this was measured.
        return use.use_of(blueprint, share, replace(load, prefill_chunk=chunk), budget=budget).least

    sizes = chunks.sizes(tokens=prompt, batch=1, streams=bool(apart))
    chunk = chunks.first_that_fits(sizes, lambda size: peak(size) <= budget)
    assert chunk is not None  # a long prompt
    return {"chunk": chunk, "peak": peak(chunk)}


def planned_text() -> str:
    """``PLANNED`` as it should be."""
    return json.dumps({shape: planned(shape) for shape in SHAPES}, indent=1) + "\n"


def page(text: str) -> str:
    """``text`` with the table as it should be."""
    return between(text, START, END, table())


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    PLANNED.write_text(planned_text(), encoding="utf-8")
