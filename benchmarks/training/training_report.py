"""What the results of training.py say, as a table. Imports nothing upstream."""

from __future__ import annotations

import statistics

from benchmarks.common import Data


def table(run: Data) -> str:
    """A row for each kind of step in each placement."""
    rows = ["| placement | step | seconds | tokens a second | VRAM peak, GiB | planned | copied, GiB |"]
    rows.append("|" + "---|" * 7)
    cells = [(entry["what"], name, cell) for entry in run["steps"].values() for name, cell in entry["cells"].items()]
    cells += [(run["steps"][cell["where"]]["what"], name, cell) for name, cell in run["optimizers"].items()]
    for what, name, cell in cells:
        median = statistics.median(cell["seconds"])
        peak, planned = cell["memory"]["peak_gib"], cell.get("planned_gib")
        shown = ["-" if value is None else f"{value:.2f}" for value in (peak, planned)]
        rows.append(
            f"| {what} | {name} | {median:.3f} | {cell['sequence'] / median:.0f} | {shown[0]} | {shown[1]} | "
            f"{cell['copied_gib']:.2f} |"
        )
    return "\n".join(rows)
