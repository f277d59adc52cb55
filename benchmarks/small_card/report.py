"""Tables and pictures of the committed runs of small_card.py.

python benchmarks/small_card/report.py          print the tables
python benchmarks/small_card/report.py FILE...  the same of these results, with a picture beside each

tools/docs.py puts the tables into docs/SMALL_CARD.md, and writes the pictures, docs/small_card-<shape>.svg.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.reporting.pictures import Panel, Row, chart
from tools.pages.markers import details

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PLOTS = ROOT / "docs"
LIBRARIES = ("transformers", "accelerate", "peft", "bitsandbytes")


def committed() -> dict[str, Path]:
    """Shape -> the newest run of it under benchmarks/results."""
    files = sorted(RESULTS.glob("*/small_card-*.json"))
    return {file.stem.removeprefix("small_card-"): file for file in files}


def read(file: Path) -> dict[str, Any]:
    run: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return run


def measured(run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The cases whose speed and memory were measured, without the second look at everything on the GPU."""
    return {
        name: entry
        for name, entry in run["cases"].items()
        if name != "all-gpu-again" and entry["error"] is None and "decode_share" in entry
    }


def peak(entry: dict[str, Any]) -> float | None:
    """The most the card held: while loading, in the longest prefill, or while decoding."""
    phases = [entry["load"], entry.get("adapter_load", entry["load"]), entry["decode"], *entry["prefill"].values()]
    peaks = [phase["peak_gib"] for phase in phases]
    return None if None in peaks else max(peaks)


def planned(entry: dict[str, Any]) -> float | None:
    """The planner's peak over the phases that were measured."""
    expected = entry.get("predicted_gib")
    if expected is None:
        return None
    phases = [expected["load"], expected["decode"], *(expected["prefill"][length] for length in entry["prefill"])]
    return float(max(phases))


def planner(run: dict[str, Any]) -> str:
    """What the planner expects of each placement against what was measured."""
    rows = ["| placement | planned peak | measured peak | planned / measured |", "|---|---|---|---|"]
    for entry in measured(run).values():
        expected, found = planned(entry), peak(entry)
        if expected is not None and found is not None:
            rows.append(f"| {what(entry)} | {expected:.2f} | {found:.2f} | {expected / found:.3f} |")
    return "\n".join(rows) if len(rows) > 2 else ""


def table(run: dict[str, Any]) -> str:
    """One row a case; a case that crashed has its error."""
    lengths = [length for length in next(iter(measured(run).values()), {"prefill": ()})["prefill"]]
    titles = [
        "placement",
        "shim",
        "layers off the GPU",
        "VRAM loaded",
        "peak loading",
        *(f"peak prefill {int(length):,}" for length in lengths),
        "peak decoding",
        "decode, of all-GPU",
        *(f"prefill {int(length):,}, all-GPU = 1" for length in lengths[:2]),
        "MiB a token",
        "answers",
    ]
    rows = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for name, entry in run["cases"].items():
        if name == "all-gpu-again" or (entry["error"] is None and "decode_share" not in entry):
            continue
        cells = [what(entry), {"reference": "on", "upstream": "**off**", "ours": "on"}[entry["who"]], layers(entry)]
        if entry["error"] is not None:
            cells += [shorten(entry["error"]), *[""] * (len(titles) - len(cells) - 1)]
        else:
            prefill = entry["prefill"]
            cells += [
                gib(entry["load"]["resident_gib"]),
                gib(entry["load"]["peak_gib"]),
                *(gib(prefill.get(length, {}).get("peak_gib")) for length in lengths),
                gib(decode_peak(entry)),
                share(entry),
                *(times(entry["prefill_times"].get(length)) for length in lengths[:2]),
                f"{entry['streamed_bytes'] / 2**20:,.0f}" if entry.get("streamed_bytes") else "-",
                outputs(entry),
            ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def what(entry: dict[str, Any]) -> str:
    return str(entry["what"]) + (f" ({entry['budget_gib']:g} GiB)" if "budget_gib" in entry else "")


def layers(entry: dict[str, Any]) -> str:
    """How many decoder layers are off the GPU; of an automatic map, what it did."""
    off = [name for names in entry.get("offloaded", {}).values() for name in names]
    if off:
        return str(len([name for name in off if ".layers." in name and name.rpartition(".")[2].isdigit()]))
    return str(entry.get("layers", 0))


def gib(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def decode_peak(entry: dict[str, Any]) -> float | None:
    """None where nothing was generated after the peak had been reset (results before slow cases were run again)."""
    decode = entry["decode"]
    ran = decode["peak_gib"] is None or decode["peak_gib"] > 1.001 * decode["resident_gib"]
    return decode["peak_gib"] if ran else None


def share(entry: dict[str, Any]) -> str:
    """Decode speed as a share of everything on the GPU; with ~ where the two were not timed in turns."""
    in_turns = "paired" in entry or entry["who"] == "reference"
    return f"{'' if in_turns else '~'}{entry['decode_share']:.2f}"


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def outputs(entry: dict[str, Any]) -> str:
    if "parity" not in entry:
        return "reference"
    return "bit-exact" if entry["parity"] == 0.0 else f"**differ by {entry['parity']}**"


def shorten(text: str, limit: int = 110) -> str:
    text = text.replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) <= limit else text[: limit - 3] + "..."


def heading(run: dict[str, Any], link: str) -> str:
    machine, reference = run["machine"], run["reference"]
    stack = ", ".join(f"{name} {machine['versions'][name]}" for name in LIBRARIES)
    parts = [f"**{run['shape']}** ({machine['device']}, {stack}, torch {machine['versions']['torch']}, {run['date']}"]
    copies = run["host_to_device_gib_s"]
    if copies:
        parts.append(f"host to device {copies['pinned']:.0f} GiB/s pinned, {copies['pageable']:.0f} pageable")
    rates = " and ".join(f"{rate:.1f}" for rate in reference["decode_tok_s"])
    parts.append(f"all on the GPU {rates} tok/s at the start and at the end; [raw]({link}))")
    return "; ".join(parts)


def section() -> str:
    """What docs/SMALL_CARD.md says of the committed runs."""
    parts: list[str] = []
    for shape, file in committed().items():
        run = read(file)
        picture = PLOTS / f"small_card-{shape}.svg"
        parts += [heading(run, file.relative_to(ROOT).as_posix()), ""]
        parts += [f"![VRAM and speed of each placement, {shape}]({picture.relative_to(ROOT).as_posix()})", ""]
        parts += [details(f"{shape}: all figures", table(run)), ""]
        if planner(run):
            parts += [details(f"{shape}: what the planner expects of the same placements", planner(run)), ""]
    return "\n".join(parts).rstrip()


def rows(run: dict[str, Any]) -> list[Row]:
    """Share of decode speed and peak VRAM of each case: what is drawn."""
    return [
        Row(entry["what"], entry["who"], (entry["decode_share"], peak(entry)))
        for entry in measured(run).values()
        if peak(entry) is not None
    ]


def pictures() -> dict[Path, str]:
    """Each picture of the committed runs, as it should be."""
    runs = {PLOTS / f"small_card-{shape}.svg": read(file) for shape, file in committed().items()}
    return {picture: drawn(run) for picture, run in runs.items() if rows(run)}


def drawn(run: dict[str, Any]) -> str:
    """Decode speed and peak VRAM of each case."""
    title = f"{run['shape']} in 4-bit on one {run['machine']['device']}"
    panels = Panel("speed, of all on the GPU", 1.0), Panel("peak VRAM, GiB")
    return chart(title, panels, rows(run))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="results of small_card.py")
    arguments = parser.parse_args(argv)
    files = arguments.files or list(committed().values())
    if not files:
        parser.error(f"no results under {RESULTS}; run benchmarks/small_card/small_card.py, or name a file")
    for file in files:
        try:
            run = read(file)
            print(f"{heading(run, file.name)}\n\n{table(run)}\n\n{planner(run)}\n")
        except (OSError, KeyError, ValueError) as error:
            parser.error(f"{file} is no result of small_card.py: {type(error).__name__}: {error}")
        if arguments.files and rows(run):
            file.with_suffix(".svg").write_text(drawn(run), encoding="utf-8")
            print(f"drew {file.with_suffix('.svg')}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
