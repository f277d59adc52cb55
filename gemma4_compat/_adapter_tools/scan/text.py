"""A scan as text: the problems, then what the adapter is, then what it does on the base."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from gemma4_compat._engine.io.text import size_text
from gemma4_compat._errors import printable

if TYPE_CHECKING:
    from gemma4_compat._adapter_tools.scan.result import Scan

_LABEL = 12


def scan_text(scan: Scan, *, width: int | None = None) -> str:
    """Everything a scan says, in lines of at most ``width`` columns, by default the terminal's; paths are not cut."""
    width = max(50, min(width or shutil.get_terminal_size().columns, 100))
    lines = [*_verdict(scan, width), "", *_adapter(scan, width)]
    if scan.base is not None:
        lines += ["", *_base(scan, width)]
    if scan.notes:
        lines += ["", "Notes:", *_listed(scan.notes, width)]
    return "\n".join(lines)


def _verdict(scan: Scan, width: int) -> Iterator[str]:
    count = len(scan.problems)
    yield "No problems." if not count else "1 problem:" if count == 1 else f"{count} problems:"
    yield from _listed([f"{problem.id}: {problem.message}" for problem in scan.problems], width)


def _adapter(scan: Scan, width: int) -> Iterator[str]:
    yield from _row("adapter", scan.adapter, width)
    total = sum(scan.keys.values())
    yield from _row("type", f"{scan.peft_type}, names of {scan.saved_from}, saved by {scan.saved_by}", width)
    yield from _row("keys", f"{total}: {_counts(scan.keys)}" if total else "none", width)
    dtypes = ", ".join(f"{count} {name}" for name, count in scan.dtypes.items()) if len(scan.dtypes) > 1 else ""
    yield from _row("weights", f"{_size(scan.nbytes)}, {dtypes or ''.join(scan.dtypes) or 'no values'}", width)
    if scan.ranks:
        ranks = ", ".join(f"{rank} in {count} layers" for rank, count in scan.ranks.items())
        yield from _row("ranks", ranks, width)
    settings = "; ".join(f"{name} {_value(value)}" for name, value in scan.settings.items())
    if settings:
        yield from _row("settings", settings, width)


def _base(scan: Scan, width: int) -> Iterator[str]:
    stored = f", {scan.quantization}" if scan.quantization else ""
    yield from _row("base", f"{scan.base} ({scan.model_class}){stored}", width)
    hits = [f"{hit.modules} {hit.kind}" for hit in scan.hits]
    towers = [hit.tower for hit in scan.hits]
    for tower in dict.fromkeys(towers):
        kinds = ", ".join(hit for hit, where in zip(hits, towers) if where == tower)
        yield from _row("on" if tower == towers[0] else "", f"{tower}: {kinds}", width)
    if not hits:
        yield from _row("on", "nothing", width)
    if scan.redirected:
        text = f"{len(scan.redirected)} targets are clipped wrappers; their inner .linear is adapted, such as "
        yield from _row("redirected", f"{text}{scan.redirected[0]}", width)
    if scan.remapped:
        key, name = next(iter(scan.remapped.items()))
        yield from _row("renamed", f"{len(scan.remapped)} keys, such as {key} to {name}", width)
    if scan.dead:
        yield from _row("no use", f"{len(scan.dead)} keys of KV-shared layers, such as {scan.dead[0]}", width)


def _row(label: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        printable(text),
        width,
        initial_indent=f"{label:<{_LABEL}}",
        subsequent_indent=" " * _LABEL,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _listed(items: Iterable[str], width: int) -> Iterator[str]:
    for item in items:
        yield from textwrap.wrap(
            printable(item),
            width,
            initial_indent="  - ",
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )


def _counts(counts: Any) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _size(nbytes: int) -> str:
    return size_text(nbytes) if nbytes >= 10 << 20 else f"{nbytes / 1024:.1f} KiB"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        shown = [str(item) for item in value]
        if len(shown) <= 8:
            return ", ".join(shown)
        ends = list(dict.fromkeys(item.rpartition(".")[2] for item in shown))  # long names differ in layers
        return (
            f"{len(shown)} that end in {', '.join(ends)}" if len(ends) <= 12 else f"{len(shown)}, such as {shown[0]}"
        )
    if isinstance(value, dict):
        return _value([f"{name}: {item}" for name, item in value.items()])
    return str(value)
