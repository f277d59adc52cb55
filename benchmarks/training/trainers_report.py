"""What the results of trainers.py say, as tables. Imports nothing upstream."""

from __future__ import annotations

import statistics

from benchmarks.common import Data

WHAT = {
    "upstream": "upstream",
    "trl": "upstream under TRL",
    "shim": "the shim, same placement",
    "chunked": "the same, loss in chunks",
    "chunked-windows": "everything on the GPU, loss in chunks, attention by windows and products",
    "fast": "everything on the GPU, after `train_fast`",
    "host": "table and towers on the host, loss in chunks",
    "streamed": "all layers on the host as well",
    "windows": "the same, attention by windows and products",
    "trl-shim": "the shim under TRL, all on the GPU",
    "unsloth": "unsloth under TRL, without its compiler",
    "unsloth-compiled": "unsloth under TRL, compiled",
}


def table(result: Data) -> str:
    """For each way and sequence: tokens a second (median and range of the steps of all rounds), VRAM, what the planner
    expects of it, losses; and the longest sequence in each budget.
    """
    lost = {name: error for name, error in result["out"].items() if name.endswith(" tokens")}
    sequences = sorted({run["sequence"] for run in result["runs"]} | {int(name.split()[-2]) for name in lost})
    with_plan = any("planned_gib" in run for run in result["runs"])
    rows = []
    for way, what in _tried(result).items():
        what += _release(way, result)
        for sequence in sequences:
            runs = [run for run in result["runs"] if (run["way"], run["sequence"]) == (way, sequence)]
            name = f"{way}, {sequence} tokens"
            if not runs:
                error = lost.get(name, "not run")
                shown = "out of memory" if "OutOfMemory" in error else error if error.startswith("no end") else "-"
                cells = [shown, *["-"] * (3 + with_plan)]
                rows.append([what, f"{sequence:,}", *cells])
                continue
            seconds = [second for run in runs for second in run["seconds"]]
            rates = [sequence / second for second in (statistics.median(seconds), max(seconds), min(seconds))]
            peaks = [
                None if None in values else max(values)
                for values in ([run["memory"][key] for run in runs] for key in ("peak_gib", "peak_reserved_gib"))
            ]
            planned = [runs[0].get("planned_gib")] if with_plan else []
            difference = result.get("differences", {}).get(name)
            rows.append(
                [
                    what,
                    f"{sequence:,}",
                    f"{rates[0]:.0f} ({rates[1]:.0f} to {rates[2]:.0f})",
                    *("-" if one is None else f"{one:.2f}" for one in (peaks[0], *planned, peaks[1])),
                    "-" if difference is None else f"{difference:.1g}" if difference else "0",
                ]
            )
    titles = ["QLoRA under Trainer", "sequence", "tokens/s", "VRAM peak, GiB", "reserved", "losses differ by"]
    if with_plan:
        titles.insert(4, "planned")
    return "\n\n".join(filter(None, [_lines(titles, rows), _fits(result)]))


def _release(way: str, result: Data) -> str:
    """The release of transformers of a way that has a process and libraries of its own, if it is another."""
    own = result.get("loads", {}).get(f"upstream, {way}", {}).get("versions", {}).get("transformers")
    return "" if own is None or own == result["machine"]["versions"]["transformers"] else f", transformers {own}"


def _fits(result: Data) -> str:
    """By way and budget the longest sequence; in bold where a ballast tensor left no more than that."""
    budgets = result.get("fits", {})
    measured = sorted({run["sequence"] for run in result["runs"]})
    rows = []
    for way, what in WHAT.items():
        found = [fits[way] for fits in budgets.values() if way in fits]
        if not found:
            continue
        shown = ["does not fit" if one["longest"] is None else f"{one['longest']:,}" for one in found]
        rows.append([what, *(f"**{text}**" if one["by"] == "ballast" else text for text, one in zip(shown, found))])
    if not rows:
        return ""
    note = (
        f"The longest sequence, of {', '.join(f'{one:,}' for one in measured)} tokens, that fits; in bold where it "
        "was tried beside a ballast tensor, elsewhere by the peaks above (reserved memory)."
    )
    return f"{note}\n\n{_lines(['longest sequence in', *(f'{budget} GiB' for budget in budgets)], rows)}"


def _lines(titles: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (titles, ["---"] * len(titles), *rows))


def _tried(result: Data) -> dict[str, str]:
    """The ways of this result that ran or failed, in words."""
    tried = {run["way"] for run in result["runs"]} | {name.partition(",")[0] for name in result["out"]}
    return {way: what for way, what in WHAT.items() if way in tried}
