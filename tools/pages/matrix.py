"""What was measured in the stacks of tests/matrix.toml."""

from __future__ import annotations

import functools
from typing import Any

import gemma4_compat
from tools.matrix import measure, stacks
from tools.pages.markers import details


@functools.cache
def results() -> dict[str, dict[str, Any]]:
    """The committed result of each stack, in the order of tests/matrix.toml."""
    return stacks.results()


def verdicts(patch: gemma4_compat.Patch) -> dict[str, list[str]]:
    """Verdict -> stacks in which it was measured; usual ones first. A new patch is not measured in all of them yet."""
    found: dict[str, list[str]] = {}
    for name, result in results().items():
        if patch.id in result["patches"]:
            found.setdefault(result["patches"][patch.id]["verdict"], []).append(name)
    usual = (measure.REPAIRED, measure.NOT_AFFECTED, measure.NOT_APPLICABLE)
    return {name: found[name] for name in sorted(found, key=lambda name: (name not in usual, name))}


def section(others: list[str]) -> str:
    """What was measured in all stacks, with lines on what was measured elsewhere, and which stacks they are."""
    found = results()
    entries = [entry for result in found.values() for entry in result["patches"].values()]
    said = [entry["verdict"] for entry in entries]
    counts = ", ".join(f"{said.count(name)} {name}" for name in sorted(set(said)))
    dates = sorted(entry["date"] for entry in entries)
    good, tests = sum(result["ok"] for result in found.values()), sum(entry["tests"]["passed"] for entry in entries)
    rows = [
        "Every reproduction runs in these stacks: without the patch, with it, and undone (`nox -s matrix`).",
        f"**{measure.REPAIRED}**: the defect is there without the patch and gone with it.",
        f"**{measure.NOT_APPLICABLE}**: the situation cannot exist there (a model class or entry point that the",
        "release lacks, a CPU without",
        "AVX512-BF16, no GPU). A new patch is measured at least at the ends of its range. Raw:",
        "[patches](docs/evidence/patches), [releases of each stack](docs/evidence/matrix.json).",
        "",
        f"- On CPUs, {dates[0]} to {dates[-1]}: {len(found)} stacks, {good} of them as claimed; of {len(said)}",
        f"  pairs of a patch and a stack {counts}; {tests} patch tests passed",
        *others,
        "",
    ]
    pins = ([name, *(result["pins"][library] for library in stacks.LIBRARIES)] for name, result in found.items())
    table = [["stack", *stacks.LIBRARIES], ["---"] * (1 + len(stacks.LIBRARIES)), *pins]
    lines = "\n".join(f"| {' | '.join(cells)} |" for cells in table)
    return "\n".join([*rows, details(f"The releases of the {len(found)} stacks", lines)])
