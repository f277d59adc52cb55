"""The constants of the planner's model of decode time, found from multiprocessors.py's results."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.common import Data
from gemma4_compat._plan import speed

#: Each constant is multiplied and divided by so much in turn, which shrinks as nothing gets better.
FIRST, LAST = 1.5, 1.0005
START = speed.Speed(layer=1e-4, quantized=4e9, experts=1e9, memory=0.8, adapted=5e-5)
#: Tokens of the static cache in a turn of the other benchmarks: their prompt and what is generated.
CONTEXT = 164
RESULTS = Path(__file__).resolve().parents[1] / "results"
#: What the constants are fitted to: a card that is kept to some of its SMs, and all of one of that kind.
FITTED = (
    "2026-11-26-h100-multiprocessors/multiprocessors-*.json",
    "2026-11-26-h100-depth/depth-E?B.json",
    "2026-11-26-h100-depth/experts-26B-A4B.json",
)
#: A shape of which no row is in the fit.
CHECKED = ("2026-11-26-h100-depth/depth-12B.json",)


def rows(patterns: Sequence[str]) -> list[Data]:
    """What was replayed: what a step does, what the card is, the seconds of a step (of the fastest turn)."""
    found: list[Data] = []
    for pattern in patterns:
        for file in sorted(RESULTS.glob(pattern)):
            run = json.loads(file.read_text(encoding="utf-8"))
            found += [row for row, _ in bounded(run) if row["bounded"]] if "counts" in run else list(whole(run))
    return found


def bounded(run: Data) -> Iterator[tuple[Data, Data]]:
    """Each case of a run of multiprocessors.py as a row, and as it is in the result.

    Memory is as its vendor states it, for so many SMs by the share of what all of them read.
    """
    sheet = data_sheet(run)
    most = max(entry["gb_s"] for found in run["counts"].values() for entry in found.values())
    for count, found in run["counts"].items():
        for case, entry in found.items():
            memory = entry["gb_s"] / most * sheet.gb_s
            card = {"multiprocessors": int(count), "ghz": entry["clock_mhz"] / 1000, "gb_s": memory}
            row = _row(run, case, card, entry["work"], entry["rounds"])
            yield row | {"bounded": int(count) < entry["of"]}, entry


def whole(run: Data) -> Iterator[Data]:
    """Rows of a run of graph_decoding.py, peers.py, experts.py or depth.py: all of a card, nothing streamed."""
    card = asdict(data_sheet(run))
    if "peers" in run:
        speeds = {"gpu": run["peers"]["shim"]["speed"]["rounds"], "gpu+lora": [run["peers"]["shim"]["adapter"]]}
        if "shim-host" in run["peers"]:
            speeds["host"] = run["peers"]["shim-host"]["speed"]["rounds"]
    elif "experts" in run:
        speeds = {"gpu": [run["cases"]["card"]["speed"]["replayed"]]}
    elif all("contexts" in case for case in run["cases"].values()):  # by depth
        short = {name: case["contexts"]["64"]["rounds"] for name, case in run["cases"].items() if name in WHAT}
        speeds = {name: [{"tok_s": turn["own"]} for turn in turns] for name, turns in short.items()}
    else:
        cases = {name: case["speed"]["rounds"] for name, case in run["cases"].items() if name in WHAT}
        speeds = {name: [turn["replayed"] for turn in turns] for name, turns in cases.items()}
    for case, turns in speeds.items():
        work = _work(run["shape"])
        work["adapted"] = work["layers"] * case.endswith("+lora")
        yield _row(run, case, card, work, [turn["tok_s"] for turn in turns])


def _row(run: Data, case: str, card: Data, work: Data, tok_s: list[float]) -> Data:
    device = run["machine"]["device"]
    work = {name: value for name, value in work.items() if name != "lookups"}  # of a model before
    what = {"what": f"{run['shape']} {case}", "shape": run["shape"], "case": case, "device": device}
    return what | {"card": card, "work": work, "seconds": 1 / max(tok_s)}


def data_sheet(run: Data) -> speed.Card:
    """The card that a run was on."""
    name = run["machine"]["device"].removeprefix("NVIDIA ")
    return next(card for known, card in speed.CARDS.items() if f"{name} ".startswith(f"{known} "))


@functools.cache
def _described(shape: str) -> speed.Work:
    from gemma4_compat._gemma4.models import build
    from gemma4_compat._gemma4.quantization.config import default_skip_modules, linear_names
    from gemma4_compat._memory import blueprint

    model = build.on_meta(shape)[0]
    names = linear_names(model, default_skip_modules(model))
    described = blueprint.describe(model, "4bit-double", names, experts=True)
    if why := speed.unknown(described, batch=1):
        raise ValueError(f"the planner has no model of {shape}: {why}")
    return speed.work(described, context=CONTEXT)


def _work(shape: str) -> Data:
    """What a token of those benchmarks' turns has to do."""
    return _described(shape).as_data()


def fitted(measured: list[Data]) -> speed.Speed:
    """Those with the smallest sum of squares of relative errors, found by coordinate descent from :data:`START`."""
    best, step = asdict(START), FIRST
    least = squares(measured, speed.Speed(**best))
    while step > LAST:
        better = False
        for name in best:
            for factor in (step, 1 / step):
                tried = best | {name: best[name] * factor}
                if (found := squares(measured, speed.Speed(**tried))) < least:
                    best, least, better = tried, found, True
        if not better:
            step = math.sqrt(step)
    return speed.Speed(**best)


def squares(measured: list[Data], constants: speed.Speed) -> float:
    return sum(error(row, constants) ** 2 for row in measured)


def error(row: Data, constants: speed.Speed) -> float:
    """What the model says of a row, as a share of what was measured, less 1."""
    found = speed.seconds(speed.Work(**row["work"]), speed.Card(**row["card"]), constants)
    return float(found / row["seconds"] - 1)


#: Of these a page shows what the model says, from what a token of the measured shape reads.
SHOWN = ("RTX 3060", "RTX 4060", "RTX 4060 Ti", "RTX 4070", "RTX 3090", "RTX 4090", "RTX 5090", "H200")
#: Cases by their names in a result.
WHAT = {
    "gpu": "everything on the card",
    "gpu+lora": "the same with LoRA",
    "host": "table and towers on the host",
    "host+lora": "the same with LoRA, table and towers on the host",
}


def table(run: Data) -> str:
    """Each case beside what the model says of it; then what the model says of other cards.

    On a CPU, of which it says nothing, its turns alone.
    """
    if run["machine"]["device"] == "CPU":
        found = [
            f"| {WHAT[case]} | {count} | {max(entry['rounds']):.1f} |"
            for count, entries in run["counts"].items()
            for case, entry in entries.items()
        ]
        return "\n".join(["| case | multiprocessors | tok/s |", "|---|---|---|", *found])
    lines = ["| case | multiprocessors | they read, GB/s | tok/s | the model | off |", "|---|---|---|---|---|---|"]
    works: dict[str, Data] = {}
    for row, entry in bounded(run):
        works.setdefault(row["case"], row["work"])
        turns = entry["rounds"]
        cells = [WHAT[row["case"]], str(row["card"]["multiprocessors"]), f"{entry['gb_s']:,.0f}"]
        cells += [f"{max(turns):.1f} (slowest turn {min(turns):.1f})", *_modelled(row)]
        lines.append(f"| {' | '.join(cells)} |")
    if "-" not in run["shape"]:
        lines += ["", f"| modelled, not measured | {' | '.join(SHOWN)} |", "|---|" + "---|" * len(SHOWN)]
        for case, work in works.items():
            rates = (1 / speed.seconds(speed.Work(**work), speed.CARDS[name]) for name in SHOWN)
            lines.append(f"| {WHAT[case]}, tok/s | {' | '.join(f'{rate:.0f}' for rate in rates)} |")
    return "\n".join(lines)


def _modelled(row: Data) -> list[str]:
    off = error(row, speed.SPEED)
    return [f"{1 / (row['seconds'] * (1 + off)):.1f}", f"{off:+.1%} of the time"]


def report() -> Data:
    """The constants; how far they are from each row, and from rows of a shape when fitted without it."""
    fitted_to = rows(FITTED)
    found = fitted(fitted_to)
    said = []
    for some, is_fitted in ((fitted_to, True), (rows(CHECKED), False)):
        for row in some:
            place = {"device": row["device"], "multiprocessors": row["card"]["multiprocessors"], "fitted": is_fitted}
            numbers = {"ms": 1000 * row["seconds"], "off": error(row, found)}
            said.append({"shape": row["shape"], "case": row["case"], **place, **numbers})
    others = {}
    for shape in sorted({row["shape"] for row in fitted_to if not row["work"]["experts"]}):  # one row knows experts
        without = fitted([row for row in fitted_to if row["shape"] != shape])
        errors = [error(row, without) for row in fitted_to if row["shape"] == shape]
        others[shape] = [min(errors), max(errors)]
    return {"constants": asdict(found), "rows": said, "fitted_to_the_others": others}


#: What :func:`report` found last.
FIT = RESULTS / "2026-11-26-h100-multiprocessors" / "fit.json"


def section() -> str:
    """What docs/BENCHMARKS.md says of it."""
    data = json.loads(FIT.read_text(encoding="utf-8"))
    lines = ["| shape | case | card | multiprocessors | a step | the model | |", "|---|---|---|---|---|---|---|"]
    for row in data["rows"]:
        cells = [row["shape"], WHAT[row["case"]], row["device"], str(row["multiprocessors"]), f"{row['ms']:.2f} ms"]
        cells += [f"{row['off']:+.1%}", "fitted" if row["fitted"] else "**checked**"]
        lines.append(f"| {' | '.join(cells)} |")
    told = ", ".join(
        f"{shape} {low:+.0%} to {high:+.0%}" for shape, (low, high) in data["fitted_to_the_others"].items()
    )
    return "\n".join([*lines, "", f"Rows of a shape, by a fit to those of the other shapes: {told}."])
