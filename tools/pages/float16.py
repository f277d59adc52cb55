"""The generated parts of docs/FLOAT16.md, from the newest run of benchmarks/training/float16.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "FLOAT16.md"
LARGEST = 65504
_WAYS = ("float16", "autocast", "bfloat16")


def run() -> tuple[Path, dict[str, Any]]:
    """The file of the newest run, and what is in it."""
    file = sorted((ROOT / "benchmarks" / "results").glob("*-cpu/float16.json"))[-1]
    return file, json.loads(file.read_text(encoding="utf-8"))


def parts() -> dict[str, str]:
    """Part of the page -> its text."""
    file, found = run()
    source = (
        f"Measured on a CPU ([raw](../{file.relative_to(ROOT).as_posix()}), transformers {found['transformers']}, "
        f"torch {found['torch']}, PEFT {found['peft']}; `python benchmarks/training/float16.py`)."
    )
    return {
        "float16 widths": f"{source}\n\n{_widths(found['widths'])}",
        "float16 rows": _rows(found["rows"]),
        "float16 sweep": _sweep(found["sweep"]),
        "float16 errors": errors(found["sweep"]),
        "float16 trained": _trained(found["trained"]),
        "float16 training": _training(found["training"]),
    }


def _widths(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| width of | hidden, intermediate | product of gate and up | largest value that a module returns "
        "| a little more: first operation beyond float16 | first module that a hook reports |",
        "|---|---|---:|---:|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['variant']} | {row['hidden']:,}, {row['intermediate']:,} | {row['product']:,.0f} "
            f"| {row['largest_output']:,.0f} | {_short(row['first'])} | {_short(row['first_module'])} |"
        )
    return "\n".join(lines)


def _rows(found: dict[str, Any]) -> str:
    """What the repair by rows keeps, how far it reaches, and what it costs."""
    bits, cost = found["bits"], found["cost"]
    same = sum(row["same"] and row["finite"] for row in bits)
    kinds = ", ".join(dict.fromkeys(row["variant"] for row in bits))
    lines = [
        f"- **Bits:** with float16 weights, a LoRA on them (with its gradients), 4 and 8 bits, {same} of {len(bits)} "
        f"tiny models ({kinds}) keep every bit.",
        f"- **Cost:** {cost['rows']['operations']} operations beside the matrix products of an MLP instead of "
        f"{cost['upstream']['operations']}, and {cost['rows']['bytes']:.0f} bytes written for each token and "
        f"neuron instead of {cost['upstream']['bytes']:.0f}, whether or not anything overflows.",
        "- **Reach,** tiny models, gate and up or up alone multiplied by powers of two:",
        "",
        "| variant | scaled | finite to, upstream | by rows | then overflows | error there | unscaled "
        "| loss scale that gradients bear there |",
        "|---|---|---:|---:|---|---:|---:|---|",
    ]
    for row in found["limits"]:
        cells = [row["variant"], row["scaled"], f"2^{row['upstream_finite_to']}", f"2^{row['finite_to']}"]
        cells += [_short(row["first"]), f"{row['error_there']:.1e}", f"{row['error']:.1e}"]
        power = row["loss_scale_power"]
        cells.append("none" if power is None else f"2^{power}")
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "One MLP of a released width with random weights, in which gate and up of a neuron align with one token. The "
        "largest error of a token's output, relative to float32, if that token's product is so many times the limit:",
        "",
        f"| width of | within the limit | {' | '.join(f'{name} times' for name in found['widths'][0]['beyond'])} |",
        "|---|---:|" + "---:|" * len(found["widths"][0]["beyond"]),
    ]
    for row in found["widths"]:
        beyond = [
            f"{one['error']:.1e}" if one["finite"] else f"output overflows: {one['largest_output']:,.0f}"
            for one in row["beyond"].values()
        ]
        lines.append(f"| {row['variant']} | {row['unscaled']:.1e} | {' | '.join(beyond)} |")
    return "\n".join(lines)


def _sweep(rows: list[dict[str, Any]]) -> str:
    """A line for each rescaling and arithmetic; the variants together."""
    lines = [
        "| scaled | arithmetic | variants | first operation beyond float16 | its value in float32 "
        "| largest output of a module before | loss scale that gradients bear |",
        "|---|---|---|---|---:|---:|---|",
    ]
    for name, way in dict.fromkeys((row["scaled"], row["way"]) for row in rows):
        of = [row for row in rows if (row["scaled"], row["way"]) == (name, way)]
        over = [row for row in of if row.get("first")]
        # An image of the 12B ends with its weights; the others where they do.
        places = sorted({re.sub(r"layers\.\d+", "layers.N", row["first"]) for row in over})
        worse = [row["variant"] for row in of if "power" in row and not row.get("first")]
        what = [_short(place) for place in places]
        what += [f"none, but ten times the error: {', '.join(worse)}"] if worse else []
        never = [row["variant"] for row in of if "power" not in row]
        what += [f"none: {', '.join(never)}"] if never else []
        there = [row["there"] for row in over if row["there"] is not None and row["there"] > LARGEST]
        powers = [row["gradients"]["loss_scale_power"] for row in of]
        cells = [name, way, ", ".join(row["variant"] for row in of), "; ".join(what), _range(there)]
        cells += [_range([row["largest_output"] for row in of]), _range(powers, "2^")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def errors(rows: list[dict[str, Any]]) -> str:
    """The errors of logits and of the adapter's gradients before anything is scaled to the limit."""
    lines = ["| variant | arithmetic | error of the logits | error of the gradients |", "|---|---|---:|---:|"]
    for variant, way in dict.fromkeys((row["variant"], row["way"]) for row in rows):
        (row,) = [
            row for row in rows if (row["variant"], row["way"], row["scaled"]) == (variant, way, "attention: output")
        ]
        lines.append(f"| {variant} | {way} | {row['error']:.1e} | {row['gradients']['error']:.1e} |")
    return "\n".join(lines)


def _range(values: list[Any], before: str = "") -> str:
    """The smallest and the largest of some numbers."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    ends = dict.fromkeys(f"{before}{end:,.0f}" for end in (min(known), max(known)))
    return " to ".join(ends)


def _trained(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | input | largest output of a module | product of gate and up | error in float16 | autocast "
        "| bfloat16 |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        errors = " | ".join(f"{row[way]:.1e}" for way in _WAYS)
        lines.append(
            f"| {row['model']} | {row['input']} | {row['largest_output']:.0f} | {row['product']:.0f} | {errors} |"
        )
    return "\n".join(lines)


def _training(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | arithmetic | loss of the first step | of the last | of the last in float32 | largest difference "
        "| steps skipped | loss scale at the end | gradients that are 0 |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row['model']} | {row['way']} | {row['first_loss']:.3f} | {row['last_loss']:.4f} "
            f"| {row['last_float32']:.4f} | {row['largest_difference']:.1e} | {row['skipped']} "
            f"| {row['loss_scale']:,.0f} | {row['vanished']:.1%} |"
        )
    return "\n".join(lines)


def _short(where: str | None) -> str:
    """The name of an operation or module without what all have in common."""
    return "" if where is None else f"`{where.replace('model.language_model.', '').replace('model.', '')}`"
