"""Tables and plots of the committed runs of small_card.py.

python benchmarks/small_card_report.py            print the tables, draw docs/small_card-<shape>.svg
python benchmarks/small_card_report.py FILE...    the same for these results, drawn beside them

Drawing needs matplotlib (`pip install "gemma4-compat[bench]"`); the tables, which tools/docs.py puts into docs/,
need nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PLOTS = ROOT / "docs"
#: What a picture shows of a case, for its digest; change it with the drawing, and committed pictures are stale.
DRAWING = "1"
NAMES = {"reference": "all on the GPU", "upstream": "upstream", "ours": "with gemma4_compat"}
COLOURS = {"reference": "#555555", "upstream": "#c44e52", "ours": "#4c72b0"}
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
        parts += [heading(run, file.relative_to(ROOT).as_posix()), "", table(run), ""]
        if planner(run):
            parts += ["What `gemma4_compat.plan_device_map` expects of the same placements:", "", planner(run), ""]
        parts += [f"![VRAM and speed of each placement, {shape}]({picture.relative_to(ROOT).as_posix()})", ""]
    return "\n".join(parts).rstrip()


def points(run: dict[str, Any]) -> list[tuple[str, str, float, float]]:
    """Who, name, peak VRAM, share of decode speed: what is drawn."""
    found = [(entry["who"], name, peak(entry), entry["decode_share"]) for name, entry in measured(run).items()]
    return [(who, name, x, y) for who, name, x, y in found if x is not None]


def digest(run: dict[str, Any]) -> str:
    """Of what is drawn. A picture carries it, so that a stale one is seen where matplotlib is missing."""
    return hashlib.sha256(json.dumps([DRAWING, run["shape"], points(run)]).encode()).hexdigest()[:16]


def is_current(run: dict[str, Any], picture: Path) -> bool:
    return picture.exists() and f"data {digest(run)}" in picture.read_text(encoding="utf-8")


def stale() -> list[Path]:
    """Pictures of committed runs that are missing or show other data."""
    pictures = {PLOTS / f"small_card-{shape}.svg": read(file) for shape, file in committed().items()}
    return [picture for picture, run in pictures.items() if not is_current(run, picture)]


def draw(run: dict[str, Any], picture: Path) -> None:
    """Peak VRAM against decode speed, one point a case. The same data gives the same bytes."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("drawing needs matplotlib: pip install 'gemma4-compat[bench]'") from None
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    shown = points(run)
    if not shown:
        raise SystemExit(f"nothing to draw for {run['shape']}: no case has VRAM figures")
    settings = {"svg.hashsalt": "gemma4_compat", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.add_subplot()
        for who in NAMES:
            of_who = [(x, y) for other, _, x, y in shown if other == who]
            if of_who:
                axes.scatter(*zip(*of_who), s=36, color=COLOURS[who], label=NAMES[who], zorder=3)
        for who, name, x, y in shown:
            axes.annotate(name, (x, y), xytext=(5, 4), textcoords="offset points", fontsize=7, color=COLOURS[who])
        axes.set_xlabel("peak VRAM, GiB (loading, prefill and decoding)")
        axes.set_ylabel("decode speed, share of everything on the GPU")
        axes.set_xlim(0, 1.12 * max(x for _, _, x, _ in shown))
        axes.set_ylim(0, 1.1 * max(y for _, _, _, y in shown))
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.set_title(f"{run['shape']} in 4-bit on {run['machine']['device']}: left and up is better")
        axes.legend(loc="lower right")
        FigureCanvasSVG(figure)
        metadata = {"Date": None, "Creator": None, "Description": f"data {digest(run)}"}
        figure.savefig(picture, format="svg", metadata=metadata)
    text = picture.read_text(encoding="utf-8")
    picture.write_text("\n".join(part.rstrip() for part in text.splitlines()) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="results of small_card.py")
    parser.add_argument("--no-plot", action="store_true", help="tables only")
    arguments = parser.parse_args(argv)
    chosen = {file: file.with_suffix(".svg") for file in arguments.files}
    if not chosen:
        chosen = {file: PLOTS / f"small_card-{shape}.svg" for shape, file in committed().items()}
    if not chosen:
        parser.error(f"no results under {RESULTS}; run benchmarks/small_card.py, or name a file")
    for file, picture in chosen.items():
        try:
            run = read(file)
            print(f"{heading(run, file.name)}\n\n{table(run)}\n\n{planner(run)}\n")
        except (OSError, KeyError, ValueError) as error:
            parser.error(f"{file} is no result of small_card.py: {type(error).__name__}: {error}")
        if not arguments.no_plot:
            draw(run, picture)
            print(f"drew {picture}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
