"""What README shows: speed by depth and placement, from the last runs of depth.py and experts.py on one card with one
release, and memory by placement, from the last runs of graph_decoding.py and experts.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from packaging.version import Version

from benchmarks.reporting.pictures import NARROW, Panel, Row, chart
from tools.pages.markers import ROOT

#: Shape -> the cases of its run, and what of the model is in host memory.
ROWS = {
    "E2B": {
        "gpu": "nothing",
        "host": "towers and per-layer embeddings",
        "streamed": "the same and all decoder layers",
    },
    "E4B": {
        "gpu": "nothing",
        "gpu+lora": "nothing; with an adapter",
        "host": "towers and per-layer embeddings",
    },
}
#: The same of the run of experts.py.
EXPERTS = {
    "26B-A4B": {
        "card": "nothing",
        "budget:8": "the experts of {away} of {layers} layers",
    }
}
ON_CARD = "layers_with_experts_on_card"
#: Tokens of context.
_LEAST, _MOST = "64", "32768"
SPEED, MEMORY = ROOT / "docs" / "speed.svg", ROOT / "docs" / "memory.svg"


def newest(shape: str, case: str, benchmark: str = "graph_decoding", done: str = "summary") -> dict[str, Any]:
    """The last committed run of this shape that has finished the case, with the newest transformers of them."""
    files = sorted((ROOT / "benchmarks" / "results").glob(f"*/{benchmark}-{shape}.json"))
    runs: list[dict[str, Any]] = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    runs = [run for run in runs if done in run["cases"].get(case, {}).get("speed", {})]
    releases = [Version(run["machine"]["versions"]["transformers"]) for run in runs]
    return next(
        run for run, release in zip(reversed(runs), reversed(releases), strict=True) if release == max(releases)
    )


def by_depth(shape: str) -> dict[str, Any]:
    """The last committed run of depth.py."""
    file = max((ROOT / "benchmarks" / "results").glob(f"*/depth-{shape}.json"))
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def at_depth(shape: str, case: str, way: str, depth: str = _LEAST) -> float | None:
    """Tokens a second after so many tokens; None where it was not measured."""
    summary = by_depth(shape)["cases"].get(case, {"contexts": {}})["contexts"].get(depth, {"summary": {}})["summary"]
    found: float | None = summary.get(way, {"median": None})["median"]
    return found


def with_experts(case: str) -> dict[str, Any]:
    """The last committed run of experts.py with the 26B-A4B that has the case."""
    return newest("26B-A4B", case, "experts", "replayed")


def section() -> str:
    """The pictures, a row for each placement, and what was measured on."""
    columns = [(way, depth) for way in ("own", "llama.cpp") for depth in (_LEAST, _MOST)]
    rows = [
        "![Tokens a second by depth of the text](docs/speed.svg) ![Peak VRAM by placement](docs/memory.svg)",
        "",
        f"| model, 4-bit | in host memory | tokens a second, after {int(_LEAST):,} | after {int(_MOST):,} "
        f"| llama.cpp, Q4_0, after {int(_LEAST):,} | after {int(_MOST):,} |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for shape, cases in ROWS.items():
        for case, what in cases.items():
            cells = [_number(at_depth(shape, case, *column)) for column in columns]
            rows.append(f"| {shape} | {what} | **{cells[0]}** | **{cells[1]}** | {cells[2]} | {cells[3]} |")
    for shape, cases in EXPERTS.items():
        for case, what in cases.items():
            speed = with_experts(case)["cases"][case]["speed"]["replayed"]["tok_s"]
            rows.append(f"| {shape} | {_away(case, what)} | **{_number(speed)}** | - | - | - |")
    notes = [_measured_on(), _memory_measured_on()]
    notes.append(
        "llama.cpp does not train, and its outputs are its own. More: [every depth](docs/benchmarks/depth.md), [first "
        "tokens](docs/DECODING_MEASURED.md#prompts), [the comparison](docs/benchmarks/peers.md), [all "
        "placements](docs/SMALL_CARD.md#measured), [benchmarks](docs/BENCHMARKS.md#decoding-by-replay)."
    )
    rows += ["", " ".join(notes)]
    return "\n".join(rows)


def _measured_on() -> str:
    """One card and one release."""
    runs = [by_depth(shape) for shape in ("E2B", "E4B", "12B")] + [with_experts(case) for case in EXPERTS["26B-A4B"]]
    (card,) = {run["machine"]["device"] for run in runs}
    (release,) = {run["machine"]["versions"]["transformers"] for run in runs}
    (day,) = {run["date"] for run in runs}
    return f"One {card}, transformers {release}, random weights in the real shapes, {day}."


def _memory_measured_on() -> str:
    runs = [newest(shape, case) for shape in ("E2B", "E4B") for case in ROWS[shape]]
    cards = {f"{run['machine']['device']}, transformers {run['machine']['versions']['transformers']}" for run in runs}
    (found,) = cards
    return f"Peak VRAM is what PyTorch allocates (E2B, E4B: one {found})."


def _away(case: str, what: str) -> str:
    run = with_experts(case)
    layers = run["experts"]["layers"]
    return what.format(layers=layers, away=layers - run["cases"][case].get(ON_CARD, 0))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def pictures() -> dict[Path, str]:
    """Each picture and its text."""
    depths = list(by_depth("E2B")["cases"]["gpu"]["contexts"])
    kinds = {"own": "ours", "llama.cpp": "other"}
    speeds = [
        Row(
            f"{int(depth):,} tokens",
            kind,
            tuple(at_depth(shape, "gpu", way, depth) for shape in ("E2B", "E4B", "12B")),
        )
        for depth in depths
        for way, kind in kinds.items()
    ]
    title = "Tokens a second by depth of text, beside llama.cpp Q4_0"
    peaks = [
        Row(f"{shape}: {what}", "ours", (peak(newest(shape, case)["cases"][case]),))
        for shape in ("E2B", "E4B")
        for case, what in ROWS[shape].items()
    ]
    peaks += [
        Row(f"26B-A4B: {_away(case, what)}", "ours", (_peak_with_experts(case),))
        for case, what in EXPERTS["26B-A4B"].items()
    ]
    memory = chart("Peak VRAM in GiB, in 4-bit, by what is in host memory", [Panel()], peaks, NARROW)
    return {SPEED: chart(title, [Panel("E2B"), Panel("E4B"), Panel("12B")], speeds, NARROW), MEMORY: memory}


def _peak_with_experts(case: str) -> float:
    found: float = with_experts(case)["cases"][case]["speed"]["replayed"]["peak_gib"]
    return found


def peak(case: dict[str, Any]) -> float:
    """GiB that torch allocated at most, while loading or decoding."""
    return max(case["load"]["memory"]["peak_gib"], case["speed"]["summary"]["peak_gib"]["replayed"])
