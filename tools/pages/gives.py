"""The README's table of placement, memory and speed, from runs of graph_decoding.py, depth.py and experts.py."""

from __future__ import annotations

import json
from typing import Any

from packaging.version import Version

from tools.pages import decoding
from tools.pages.markers import ROOT

#: Shape -> the cases of its run, and what a reader calls them.
ROWS = {
    "E2B": {
        "gpu": "nothing",
        "host": "towers and per-layer embeddings",
        "streamed": "the same and all decoder layers",
    },
    "E4B": {
        "gpu": "nothing",
        "gpu+lora": "the same, with an adapter",
        "host": "towers and per-layer embeddings",
    },
}
#: The same of the runs of experts.py.
EXPERTS = {
    "26B-A4B": {
        "card": "nothing",
        "budget:8": "the experts of {away} of {layers} layers",
    }
}
ON_CARD = "layers_with_experts_on_card"


def newest(shape: str, case: str, benchmark: str = "graph_decoding", done: str = "summary") -> dict[str, Any]:
    """The last committed run of this shape that has finished the case, with the newest transformers of them."""
    files = sorted((ROOT / "benchmarks" / "results").glob(f"*/{benchmark}-{shape}.json"))
    runs: list[dict[str, Any]] = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    runs = [run for run in runs if done in run["cases"].get(case, {}).get("speed", {})]
    releases = [Version(run["machine"]["versions"]["transformers"]) for run in runs]
    return next(
        run for run, release in zip(reversed(runs), reversed(releases), strict=True) if release == max(releases)
    )


def section() -> str:
    """A row for each placement, and what was measured on."""
    rows = [
        "| model, 4-bit | in host memory | peak VRAM | tokens a second | with `decode_fast` | llama.cpp, Q4_0 |",
        "|---|---|---:|---:|---:|---:|",
    ]
    dates: list[str] = []
    for shape, cases in ROWS.items():
        for case, what in cases.items():
            run = newest(shape, case)
            dates.append(run["date"])
            found = run["cases"][case]["speed"]["summary"]
            speed = found["tok_s"]
            rows.append(
                f"| {shape} | {what} | {peak(run['cases'][case]):.2f} GiB | {speed['eager']['median']:.1f} "
                f"| **{at_depth(shape, case, 'own') or speed['replayed']['median']:.1f}** "
                f"| {llama(shape, case)} |"
            )
    for shape, cases in EXPERTS.items():
        for case, what in cases.items():
            measured = newest(shape, case, "experts", "replayed")
            dates.append(measured["date"])
            found = measured["cases"][case]["speed"]
            layers = measured["experts"]["layers"]
            what = what.format(layers=layers, away=layers - measured["cases"][case].get(ON_CARD, 0))
            rows.append(
                f"| {shape} | {what} | {found['replayed']['peak_gib']:.2f} GiB | {found['eager']['tok_s']:.1f} "
                f"| **{found['replayed']['tok_s']:.1f}** | - |"
            )
    machine, settings = run["machine"], run["settings"]
    measured_on = " to ".join(sorted({min(dates), max(dates)}))
    other = measured["machine"]["device"]
    besides = f" (26B-A4B: one {other})" if other != machine["device"] else ""
    rows += [
        "",
        f"One {machine['device']}{besides}, transformers {machine['versions']['transformers']}, random weights in the "
        f"real shapes, a prompt of {settings['prompt']} tokens and at least {settings['tokens']['replayed']} new ones "
        f"({measured_on}); VRAM is PyTorch's peak allocation, including loading. Without `decode_fast`, the CPU "
        f"limits decoding speed. {deep()} llama.cpp does not train, and its outputs are its own "
        "([comparison](docs/benchmarks/peers.md)). Longer contexts, a comparison with "
        "upstream and all figures: "
        "[a small card](docs/SMALL_CARD.md), [benchmarks](docs/BENCHMARKS.md#decoding-by-replay).",
    ]
    return "\n".join(rows)


def by_depth(shape: str) -> dict[str, Any]:
    """The last committed run of depth.py."""
    file = max((ROOT / "benchmarks" / "results").glob(f"*/depth-{shape}.json"))
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def at_depth(shape: str, case: str, way: str, depth: str = "64") -> float | None:
    """Tokens a second after so many tokens; None where it was not measured."""
    found: float | None = (
        by_depth(shape)["cases"].get(case, {"contexts": {}})["contexts"].get(depth, {"summary": {}})["summary"]
    ).get(way, {"median": None})["median"]
    return found


def deep() -> str:
    """What decode_fast and llama.cpp reach in the same run, at the least and the greatest depth of the last runs."""
    found: list[str] = []
    for shape in ("E2B", "E4B", "12B"):
        run = by_depth(shape)
        contexts = run["cases"]["gpu"]["contexts"]
        least, most = min(contexts, key=int), max(contexts, key=int)
        own, peer = (
            " and ".join(f"{contexts[depth]['summary'][way]['median']:.0f}" for depth in (least, most))
            for way in ("own", "llama.cpp")
        )
        found.append(f"{shape} {own} (llama.cpp {peer})")
    return (
        f"`decode_fast` and llama.cpp in one run for each model: one {run['machine']['device']}, {run['date']}. "
        "Tokens a second after "
        f"{int(least):,} and {int(most):,} tokens of context, nothing in host memory: {', '.join(found)}; "
        f"[all depths](docs/benchmarks/depth.md). {decoding.first_tokens()}"
    )


def llama(shape: str, case: str) -> str:
    """Tokens a second of llama.cpp; "-" where it was not measured."""
    found = at_depth(shape, case, "llama.cpp")
    return "-" if found is None else f"{found:.1f}"


def peak(case: dict[str, Any]) -> float:
    """GiB that torch allocated at most, while loading or decoding."""
    return max(case["load"]["memory"]["peak_gib"], case["speed"]["summary"]["peak_gib"]["replayed"])
