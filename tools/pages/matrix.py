"""What was measured in the stacks of tests/matrix.toml."""

from __future__ import annotations

import functools
from typing import Any

import gemma4_compat
from gemma4_compat._engine import versions
from tools.matrix import measure, stacks


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


def measured(patch: gemma4_compat.Patch) -> dict[str, str]:
    """Verdict -> with which releases of the libraries that the patch depends on it was measured."""
    known, listed = stacks.read(), stacks.releases()
    found = {}
    for verdict, names in verdicts(patch).items():
        parts = []
        for library in stacks.conditions(patch):
            if library in listed:
                seen = {known[name].pins[library] for name in names}
                parts.append(f"{library} {versions.span_text(seen, listed[library])}")
        found[verdict] = f"{'; '.join(parts)} ({len(names)} {'stack' if len(names) == 1 else 'stacks'})"
    return found


def page_section() -> list[str]:
    """Every stack and every patch."""
    marks = {measure.REPAIRED: "R", measure.NOT_AFFECTED: "-", measure.NOT_APPLICABLE: "n/a"}
    patches = gemma4_compat.patches()
    rows = [
        "Every reproduction ran in these stacks: without the patch, with it, and undone. Where there is no *, the",
        "other tests of the patch ran, too (`nox -s matrix`; raw results: [matrix/](matrix)). **R**: affected,",
        "repaired; **-**: not affected; **n/a**: not applicable, the situation cannot exist there (a model class or",
        "entry point that the release lacks, a CPU without AVX512-BF16, no GPU: [GPU.md](GPU.md)); **?**: not run",
        "there yet, which only a new patch may be, and never at an end of its range.",
        "",
        "Columns: " + ", ".join(f"{number} `{patch.id}`" for number, patch in enumerate(patches, 1)) + ".",
        "",
        " | ".join(["| stack", *stacks.LIBRARIES, *map(str, range(1, len(patches) + 1))]) + " |",
        "|" + "---|" * (5 + len(patches)),
    ]
    for name, result in results().items():
        entries = [result["patches"].get(patch.id) for patch in patches]
        said = [
            "?"
            if entry is None
            else marks.get(entry["verdict"], entry["verdict"]) + (" *" if sum(entry["tests"].values()) <= 3 else "")
            for entry in entries
        ]
        pins = [result["pins"][library] for library in stacks.LIBRARIES]
        rows.append(f"| {' | '.join([name, *pins, *said])} |")
    return rows


def summary() -> str:
    """The matrix in a paragraph."""
    found = results()
    entries = [entry for result in found.values() for entry in result["patches"].values()]
    tests = sum(entry["tests"]["passed"] for entry in entries)
    dates = sorted({entry["date"] for entry in entries})
    said = [entry["verdict"] for entry in entries]
    counts = ", ".join(f"{said.count(name)} {name}" for name in sorted(set(said)))
    return (
        f"{len(found)} stacks, {sum(result['ok'] for result in found.values())} of them as claimed: "
        f"{len(said)} pairs of a patch and a stack ({counts}), {tests} patch tests passed, "
        f"measured {' and '.join(dates)}; [the table](docs/PATCHES.md#the-matrix)."
    )
