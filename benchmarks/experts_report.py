"""What the results of experts.py say, as tables. Imports nothing upstream."""

from __future__ import annotations

from common import Data

WHAT = {
    "card": "everything on the card",
    "experts": "experts of all layers in host memory",
    "layers": "all layers in host memory, without experts streamed",
    "whole": "all layers in host memory, streamed as a whole",
}


def table(run: Data) -> str:
    """A row for each placement."""
    rows = []
    for name, case in run["cases"].items():
        memory, speed, bits = (case.get(part) or {} for part in ("memory", "speed", "bits"))
        if not any((memory, speed, bits)):
            continue
        differ = [value for value in bits.values() if isinstance(value, float)]
        rows.append(
            [
                WHAT.get(name) or f"{name.partition(':')[2]} GiB of VRAM",
                _number(memory.get("loaded_gib")),
                *(_number(memory.get(length, {}).get("peak_gib")) for length in ("2048", "8192")),
                *(_number(speed.get(way, {}).get("tok_s"), ".1f") for way in ("eager", "replayed")),
                str(max(differ)) if differ else "-",
            ]
        )
    titles = (
        *("placement", "VRAM loaded, GiB", "peak, prompt of 2,048 tokens", "of 8,192"),
        *("tok/s eager", "tok/s replayed", "largest difference from the card"),
    )
    lines = [titles, ("---",) * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(value: float | None, shown: str = ".2f") -> str:
    return "-" if value is None else format(value, shown)
