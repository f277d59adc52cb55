"""A part of docs/CHECK.md: what benchmarks/small_card/checks.py found on a filled card and of planted faults."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from gemma4_compat._engine.io.text import size_text
from tools.pages.markers import ROOT

_RESULTS = ROOT / "benchmarks" / "results"
#: The planted faults, in the order of the page.
_FAULTS = {
    "patch": "a patch is off",
    "adapter": "an adapter of another shape",
    "disk": "a full disk",
}


def section() -> str:
    """The newest run of each check of each shape; nothing without one."""
    files = sorted(_RESULTS.glob("*/checks-*.json"))
    results = {str(file.relative_to(ROOT)): json.loads(file.read_text(encoding="utf-8")) for file in files}
    newest = {
        (found["shape"], name): path
        for path, found in results.items()
        for name, run in found["runs"].items()
        if "left_out" not in run
    }
    for path, found in results.items():
        shape, runs = found["shape"], found["runs"]
        found["runs"] = {name: run for name, run in runs.items() if newest.get((shape, name)) == path}
    return of({path: found for path, found in results.items() if found["runs"]})


def of(results: Mapping[str, Any]) -> str:
    """The part about these results, by their paths; nothing of what was left out."""
    ran = {
        path: found | {"runs": {name: run for name, run in found["runs"].items() if "left_out" not in run}}
        for path, found in results.items()
    }
    if not any(found["runs"] for found in ran.values()):
        return ""
    sizes, faults = [], []
    runs = [(found["shape"], name, run) for found in ran.values() for name, run in found["runs"].items()]
    for shape, name, run in sorted(runs, key=_place):
        if name in _FAULTS:
            faults.append(f"| {shape} | {_FAULTS[name]} | {_ended(run)} | {run['seconds']:.0f} s |")
        else:
            sizes += _size(shape, name, run)
    lines = ["## A filled card, and planted faults", "", _said(ran), ""]
    if sizes:
        lines.append(
            "| model | free on the card | placement | loading | planned | running | planned | the check ends with |"
        )
        lines += ["|---|---|---|---:|---:|---:|---:|---|", *sizes, ""]
    if faults:
        lines += ["| model | fault | the check ends with | it took |", "|---|---|---|---:|", *faults, ""]
    return "\n".join(lines).rstrip()


def _place(entry: tuple[str, str, Any]) -> tuple[str, int, str]:
    """Its place on the page: by shape; the largest card first; faults as in :data:`_FAULTS`."""
    shape, name, _ = entry
    if name in _FAULTS:
        return shape, list(_FAULTS).index(name), name
    return shape, -int(name.partition("GiB")[0]), name


def _said(results: Mapping[str, Any]) -> str:
    runs = [run for found in results.values() for run in found["runs"].values()]
    wrong = sum(not run["good"] for run in runs)
    who = "it" if wrong == 1 else "they"
    judged = f"**{wrong} did not end as {who} should**" if wrong else "each ended as it should"
    gpus = {gpu["name"] for run in runs if run["report"] and (gpu := run["report"]["machine"]["gpu"])}
    dates = sorted({run["report"]["date"] for run in runs if run["report"]})
    where = f"{', '.join(sorted(gpus)) or 'no GPU'}, {', '.join(dates)}"
    some = any(name in _FAULTS for found in results.values() for name in found["runs"])
    raw = ", ".join(f"[{found['shape']}]({path})" for path, found in results.items())
    return (
        f"{len(runs)} checks of random weights in real shapes with an adapter of rank 16; {judged} ({where}; "
        f"`python benchmarks/small_card/checks.py`; raw: {raw}). For a size, another process held the rest of the "
        f"card{'; the faults had all of it' if some else ''}. Peaks are what PyTorch allocated at most."
    )


def _size(shape: str, name: str, run: Mapping[str, Any]) -> Iterator[str]:
    head = f"{shape} | {name.partition('GiB')[0]} GiB{'' if '--quick' in run['arguments'] else ', all placements'}"
    end = f"{_ended(run)} ({run['seconds']:.0f} s)"
    if not run["report"]:
        yield f"| {head} |  |  |  |  |  | {end} |"
        return
    for place in run["report"]["placements"]:
        planned = place["planned"]
        steps = None if planned is None else max(planned["prefill"], planned["decode"])
        sizes = (place["loading_peak"], planned and planned["loading"], place["running_peak"], steps)
        failed = "".join(f"; {failure['step']}: {failure['type']}" for failure in place["failures"])
        cells = [head, f"{place['title']}{failed}", *(size_text(size) if size else "" for size in sizes), end]
        yield f"| {' | '.join(cells)} |"
        head, end = " | ", ""


def _ended(run: Mapping[str, Any]) -> str:
    """What a run said at last."""
    last = run["report"]["verdict"]["text"] if run["report"] else (run["said"] or ["nothing"])[-1]
    return str(last).replace("|", "\\|")
