"""Tables of the committed runs of benchmarks whose results are in folders of benchmarks/results.

python benchmarks/reporting/compare_report.py  print all of them

questions.py makes the pages in docs/benchmarks of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.decoding import depth_report, multiprocessors_fit
from benchmarks.decoding import report as graph_decoding_report
from benchmarks.experts import report as experts_report
from benchmarks.peers import report as peers_report
from benchmarks.training import trainers_report, training_report

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
LIBRARIES = ("transformers", "accelerate", "peft", "bitsandbytes")
CALLS = ("python_calls", "c_calls")
#: Of a case of graph_decoding.py and experts.py: what a table shows.
PARTS = ("speed", "fusing", "waiting", "bits", "short", "endurance", "memory", "training")
#: Of these every run is shown, elsewhere the newest one of a shape.
EVERY = ("trainers", "peers", "depth")
#: In the order of their sizes.
SHAPES = ("tiny", "tiny-36", "E2B", "E4B", "12B", "26B-A4B-6", "31B")
#: Those that say of each thing that was not run why.
REASONS = ("peers", "depth")
Run = dict[str, Any]


def committed(benchmark: str) -> dict[str, Path]:
    """Stack and shape -> the newest run of it under benchmarks/results; of :data:`EVERY` file -> the run."""
    found: dict[str, Path] = {}
    for file in sorted(RESULTS.glob(f"*/{benchmark}-*.json")):
        run = read(file)
        key = f"{run['machine']['versions']['transformers']} {run['shape']}"
        found[str(file) if benchmark in EVERY else key] = file
    return found


def earlier(benchmark: str) -> dict[Path, Run]:
    """Older runs of a shape, each with the parts of its cases that no newer run has."""
    found: dict[Path, Run] = {}
    known: dict[str, set[tuple[str, str]]] = {}
    newest = set(committed(benchmark).values())
    for file in sorted(RESULTS.glob(f"*/{benchmark}-*.json"), reverse=True):
        run = read(file)
        key = f"{run['machine']['versions']['transformers']} {run['shape']}"
        seen = known.setdefault(key, set())
        parts = {(name, part) for name, case in run.get("cases", {}).items() for part in case if shown(case, part)}
        if file not in newest and parts - seen:
            cases = {
                name: {part: data for part, data in case.items() if part not in PARTS or (name, part) not in seen}
                for name, case in run["cases"].items()
                if any((name, part) in parts - seen for part in case)
            }
            found[file] = run | {"cases": cases, "not_run": []}
        seen |= parts
    return found


def shown(case: Run, part: str) -> bool:
    """Whether a run has finished this part of a case."""
    data = case.get(part)
    if part not in PARTS or not data:
        return False
    if part == "bits":
        return any(not isinstance(one, dict) or "error" not in one for one in data.values())
    return "rounds" not in data or "summary" in data


def read(file: Path) -> Run:
    run: Run = json.loads(file.read_text(encoding="utf-8"))
    return run


def section(benchmark: str) -> str:
    """All tables of the committed runs of a benchmark."""
    runs = {file: read(file) for file in committed(benchmark).values()} | earlier(benchmark)
    if not runs:
        return (
            f"No result is committed yet; `python {common.script(benchmark)} --shape E2B --out "
            f"benchmarks/results/DATE-DEVICE/{benchmark}-E2B.json` makes one."
        )
    parts: list[str] = []
    for file, run in sorted(runs.items(), key=lambda item: (item[1]["shape"], str(item[0]))):
        parts += [heading(run, f"../{file.relative_to(ROOT).as_posix()}"), "", TABLES[benchmark](run), ""]
        if run.get("note"):
            parts += [run["note"], ""]
        if missing := not_run(run, runs.values()) if benchmark in EVERY else run["not_run"]:
            why = "" if benchmark in REASONS else ", for lack of time"
            parts += [f"Not run{why}: {', '.join(missing)}.", ""]
    lines = "\n".join(parts).rstrip().splitlines()
    once = {line: number for number, line in reversed(list(enumerate(lines)))}  # what is true of every run
    return "\n".join(
        line for number, line in enumerate(lines) if not line.startswith("- Not measured") or once[line] == number
    )


def not_run(run: Run, others: Iterable[Run]) -> list[str]:
    """What a run had no time for, without what another one on such a device has."""
    place = run["shape"], run["machine"]["device"]
    beside = [other for other in others if (other["shape"], other["machine"]["device"]) == place]
    had = {f"{one['way']}, {one['sequence']} tokens" for other in beside for one in other.get("runs", ())}
    peers = {name for other in beside for name, peer in other.get("peers", {}).items() if "summary" in peer["speed"]}
    return [name for name in run["not_run"] if name not in had and name.split()[0] not in peers]


def summary() -> str:
    """What docs/EVIDENCE.md says of the committed runs: a row for each shape on each stack."""
    loads, idles = (
        {key: read(file) for key, file in committed(name).items()} for name in ("adapter_load", "idle_shim")
    )
    rows = [
        "| shape, transformers | adapter onto a split base: time, of upstream's | VRAM after it, of base + adapter "
        "| the same, upstream | a token, all on the GPU: cost of the shim | with an adapter |",
        "|---|---|---|---|---|---|",
    ]
    for key in sorted(loads.keys() | idles.keys()):
        cells = [named(loads.get(key) or idles[key])]
        towers = loads[key]["summary"]["towers"] if key in loads else {}
        goal = towers.get("goal", {"reached": True})
        missed = "" if goal["reached"] else f"; the goal of {goal['ratio']} is missed"
        cells += [ratio(load_ratio(towers)) + missed, *(held(towers.get(side)) for side in ("ours", "upstream"))]
        cells += [cost(idles.get(key), model) for model in ("base", "adapter")]
        rows.append(f"| {' | '.join(cells)} |")
    if len(rows) == 2:
        return "No result is committed yet."
    return "\n".join(rows)


def measured_when() -> str:
    """What docs/EVIDENCE.md says of all results: when, on what, which benchmarks of which shapes."""
    found: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for file in sorted(RESULTS.glob("*/*.json")):
        run = read(file)
        if not isinstance(run, dict) or "date" not in run or not isinstance(run.get("machine"), dict):
            continue  # of a benchmark whose page says it
        place = run["date"], run["machine"]["device"], run["machine"]["versions"].get("transformers", "-")
        link = f"[{run.get('shape', file.stem)}](../{file.relative_to(ROOT).as_posix()})"
        found.setdefault(place, {}).setdefault(file.stem.partition("-")[0], []).append(link)
    rows = ["| day | device | transformers | measured |", "|---|---|---|---|"]
    for place, benchmarks in sorted(found.items()):
        said = "; ".join(f"{benchmark} {', '.join(links)}" for benchmark, links in sorted(benchmarks.items()))
        rows.append(f"| {' | '.join(place)} | {said} |")
    return "\n".join(rows)


def named(run: Run, of: str = "") -> str:
    """The shape, where it was not on a GPU, and the stack (``of`` before its release)."""
    on_cpu = run["machine"]["device"] == "CPU"
    return f"{run['shape']}{' on a CPU' * on_cpu}, {of}{run['machine']['versions']['transformers']}"


def held(side: Run | None) -> str:
    """What is on the card after an adapter load, as a share of base and adapter; or what it died of."""
    if side is None:
        return "-"
    if side["error"] is not None:
        return cell(side["error"])
    return f"{side['of_base_and_adapter']:.3f}" if "of_base_and_adapter" in side else "-"


def cost(run: Run | None, model: str) -> str:
    """Of a decoded token: function calls, which are exact, and time, next to what the same setting differs by."""
    entry = (run or {"models": {}})["models"].get(model, {})
    token = entry.get("costs", {}).get("token")
    if token is None:
        return "-"
    with_shim, without = (sum(entry["calls"]["token"][kind][side] for kind in CALLS) for side in (0, 1))
    calls = f"{with_shim - without:+} of {without:,} calls"
    if token["indistinguishable_from_zero"] is None:
        return f"{calls}; too few rounds for the time"
    return f"{calls}; time {100 * token['overhead']:+.2f} % (noise {100 * token['noise']:.2f} %)"


def heading(run: Run, link: str) -> str:
    machine = run["machine"]
    stack = ", ".join(f"{name} {machine['versions'][name]}" for name in LIBRARIES)
    driver = f", driver {machine['driver']}" if machine["driver"] else ""
    return (
        f"**{run['shape']}** ({machine['device']}{driver}, {stack}, torch {machine['versions']['torch']}, "
        f"{run['date']}; `{run['command']}`; [raw]({link}))"
    )


# adapter_load.py


def adapter_load(run: Run) -> str:
    """Times, and what is on the card before, during and after."""
    titles = (
        *("placement", "shim", "first in process", "after that", "ratio", "base", "peak", "after"),
        *("of base + adapter", "towers on"),
    )
    rows = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for entry in run["summary"].values():
        for side, shim in (("upstream", "**off**"), ("ours", "on")):
            data = entry[side]
            if data["error"] is not None:
                cells = [entry["what"], shim, cell(data["error"]), *[""] * (len(titles) - 3)]
            else:
                first = [seconds for seconds in data["first_in_process_s"] if seconds is not None]
                cells = [
                    *(entry["what"], shim, f"{first[0]:.2f} s" if first else "-"),
                    f"{data['median_s']:.2f} s" if "median_s" in data else "-",
                    ratio(load_ratio(entry)) if side == "ours" else "1",
                    *(gib(data.get(key)) for key in ("base_gib", "peak_gib", "after_gib")),
                    f"{data['of_base_and_adapter']:.3f}" if "of_base_and_adapter" in data else "-",
                    ", ".join("the host" if place == "meta" else place for place in data.get("towers_on", [])),
                ]
            rows.append(f"| {' | '.join(cells)} |")
    packages = {
        side: data["own_s_of_packages"] for side, data in run.get("profile", {}).items() if "own_s_of_packages" in data
    }
    if "ours" in packages:
        share = packages["ours"].get("gemma4_compat", 0.0) / sum(packages["ours"].values())
        rows += ["", f"Of a profiled load with the shim, {100 * share:.1f} % are spent in gemma4_compat's own code."]
    return "\n".join(rows)


def load_ratio(entry: Run) -> Run | None:
    """Of what was loaded in turns; where there was time for none, of the first load of each process."""
    if not entry or entry["ratio"] is not None:
        return entry.get("ratio")
    first = [entry[side].get("first_in_process_s", [None])[0] for side in ("ours", "upstream")]
    if None in first:
        return None
    found = first[0] / first[1]
    return {"median": found, "interval_95": [found, found], "of": 1, "first": True}


# adapter_whole.py

HOW = {"peft": "`PeftModel.from_pretrained`", "transformers": "`model.load_adapter`"}


def adapter_whole(run: Run) -> str:
    """Seconds of both sides, and their ratio."""
    titles = ("shape", "loaded by", "upstream", "with the shim", "ratio", "first load: upstream", "first load: shim")
    rows = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for shape, entry in run["shapes"].items():
        for how, found in entry["summary"].items():
            took, first, goal = found["seconds"], found["first_s"], found["goal"]
            missed = "" if goal["reached"] else f"; the goal of {goal['ratio']} is missed"
            cells = [
                *(
                    shape,
                    HOW[how],
                    f"{took['upstream']:.2f} s",
                    f"{took['ours']:.2f} s",
                    ratio(took["ratio"]) + missed,
                ),
                *(f"{first[side]:.2f} s" for side in ("upstream", "ours")),
            ]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


# idle_shim.py

VERDICTS = {True: "yes", False: "no", None: "too few rounds"}


def idle_shim(run: Run) -> str:
    """Overhead and noise, and the calls."""
    rows = [
        "| model | | without | overhead | 95 % | noise | indistinguishable from zero | calls without | calls more "
        "| instructions more |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for entry in run["models"].values():
        for name, cost in entry.get("costs", {}).items():
            low, high = (100 * (end - 1) for end in cost["ratios"]["A/B"]["interval_95"])
            calls = entry["calls"].get(name)
            without = sum(calls[kind][1] for kind in CALLS)
            more = sum(calls[kind][0] for kind in CALLS) - without
            cells = [
                *(
                    entry["what"],
                    {"token": "a decoded token", "prefill": f"prefill {run['settings']['prefill']}"}[name],
                ),
                *(f"{cost['ms_without']:.2f} ms", f"{100 * cost['overhead']:+.2f} %", f"{low:+.2f} to {high:+.2f}"),
                *(f"{100 * cost['noise']:.2f} %", VERDICTS[cost["indistinguishable_from_zero"]]),
                *(f"{without:,}", f"{more:+,} ({100 * calls['more']:+.1f} %)"),
                f"{100 * (calls['instructions'][0] / calls['instructions'][1] - 1):+.1f} %"
                if "instructions" in calls
                else "-",
            ]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(
        [
            *rows,
            "",
            "Noise: how far apart measurements of the same setting may be taken to be (95 %). Calls: of Python and C "
            "functions, exact; instructions: of the interpreter, exact.",
        ]
    )


# model_lock.py


def model_lock(run: Run) -> str:
    """Cost and noise of the lock, and the calls."""
    rows = [
        "| model | a forward of one token, without | cost of the lock | 95 % | noise | indistinguishable from zero "
        "| calls without | calls more | rounds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, entry in run["models"].items():
        cost, calls = entry["cost"], entry["calls"]
        low, high = (100 * (end - 1) for end in cost["ratios"]["cost"]["interval_95"])
        cells = [
            *(name, f"{cost['ms_without']:.2f} ms", f"{100 * cost['overhead']:+.2f} %", f"{low:+.2f} to {high:+.2f}"),
            *(f"{100 * cost['noise']:.2f} %", VERDICTS[cost["indistinguishable_from_zero"]]),
            f"{calls['without']:,}",
            f"{calls['with'] - calls['without']:+,} ({100 * calls['more']:+.1f} %)",
            str(len(entry["rounds"])),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(
        [
            *rows,
            "",
            "Table, towers and every layer are offloaded. Noise: how far apart blocks with the same setting may be "
            "taken to be (95 %). Calls: of Python and C functions, exact.",
        ]
    )


# alternatives.py


def alternatives(run: Run) -> str:
    """One row a choice; a crash has its error."""
    titles = ("what", "shim", "works", "VRAM", "peak", "decode, of all-GPU", "answers, of the same weights on the GPU")
    rows = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for entry in run["choices"].values():
        if "share" not in entry and entry["error"] is None:
            continue  # a reference that was asked for its answers only
        shim = "on" if entry["who"] == "ours" else "**off**"
        if entry["error"] is not None:
            cells = [entry["what"], shim, f"no: {cell(entry['error'], 200)}", "", "", "", ""]
        else:
            answer = entry["answer"]
            cells = [
                *(entry["what"], shim, works(entry), gib(entry["resident_gib"]), gib(entry["peak_gib"])),
                *(f"{entry['share']:.2f}", said(answer)),
            ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def works(entry: Run) -> str:
    """Whether it does, and whether what was offloaded is still where it was put."""
    before, after = entry["prepare"]["on"], entry["answer"]["on"]
    back = [part for part in before if "meta" in before[part] and "meta" not in after[part]]
    return f"yes, but {' and '.join(back)} came back to the GPU" if back else "yes"


def said(answer: Run) -> str:
    if "parity" not in answer:
        return "reference"
    if answer["parity"] == 0.0:
        return "bit-exact"
    tokens = "" if answer["same_tokens"] else ", other tokens"
    return f"**logits differ by {answer['logits_differ_by']}{tokens}**"


def cell(text: str, limit: int = 110) -> str:
    text = text.replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) <= limit else text[: limit - 3] + "..."


def gib(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} GiB"


def ratio(spread: Run | None) -> str:
    if spread is None:
        return "-"
    low, high = spread["interval_95"]
    if spread.get("first"):
        return f"**{spread['median']:.2f}** (first loads of both processes)"
    rounds = f"{spread['of']} round{'s' * (spread['of'] != 1)}"
    return f"**{spread['median']:.2f}** ({low:.2f} to {high:.2f}, {rounds})"


TABLES: dict[str, Callable[[Run], str]] = {
    "adapter_load": adapter_load,
    "adapter_whole": adapter_whole,
    "idle_shim": idle_shim,
    "model_lock": model_lock,
    "alternatives": alternatives,
    "graph_decoding": graph_decoding_report.table,
    "depth": depth_report.table,
    "peers": peers_report.table,
    "multiprocessors": multiprocessors_fit.table,
    "experts": experts_report.table,
    "experts_loading": experts_report.loading,
    "disk_reads": experts_report.disk_reads,
    "training": training_report.table,
    "trainers": trainers_report.table,
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(argv)
    for benchmark in TABLES:
        print(f"## {benchmark}\n\n{section(benchmark)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
