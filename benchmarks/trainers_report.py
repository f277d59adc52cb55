"""What the results of trainers.py say, as a table. Imports nothing upstream."""

from __future__ import annotations

import statistics

from common import Data

WHAT = {
    "upstream": "upstream",
    "shim": "the shim, same placement",
    "chunked": "the same, loss in chunks",
    "host": "table and towers on the host, loss in chunks",
    "streamed": "all layers on the host, too",
}


def table(result: Data) -> str:
    """For each way and sequence: tokens a second (median and range of the steps of all rounds), VRAM, losses."""
    sequences = sorted({run["sequence"] for run in result["runs"]})
    rows = []
    for way, what in _tried(result).items():
        for sequence in sequences:
            runs = [run for run in result["runs"] if (run["way"], run["sequence"]) == (way, sequence)]
            name = f"{way}, {sequence} tokens"
            if not runs:
                error = result["out"].get(name, "not run")
                rows.append([what, f"{sequence:,}", "out of memory" if "OutOfMemory" in error else "-", "-", "-", "-"])
                continue
            seconds = [second for run in runs for second in run["seconds"]]
            rates = [sequence / second for second in (statistics.median(seconds), max(seconds), min(seconds))]
            peaks = [
                None if None in values else max(values)
                for values in ([run["memory"][key] for run in runs] for key in ("peak_gib", "peak_reserved_gib"))
            ]
            difference = result.get("differences", {}).get(name)
            rows.append(
                [
                    what,
                    f"{sequence:,}",
                    f"{rates[0]:.0f} ({rates[1]:.0f} to {rates[2]:.0f})",
                    *("-" if peak is None else f"{peak:.2f}" for peak in peaks),
                    "-" if difference is None else f"{difference:.1g}" if difference else "0",
                ]
            )
    titles = ("QLoRA under Trainer", "sequence", "tokens/s", "VRAM peak, GiB", "reserved", "losses differ by")
    lines = [titles, ("---",) * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _tried(result: Data) -> dict[str, str]:
    """The ways of this result that ran or failed, in words."""
    tried = {run["way"] for run in result["runs"]} | {name.partition(",")[0] for name in result["out"]}
    return {way: what for way, what in WHAT.items() if way in tried}
