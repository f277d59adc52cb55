"""Sizes, runs of numbers and tables as text, for all reports of the package."""

from __future__ import annotations

import enum
import itertools
import numbers
import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gemma4_compat._errors import Gemma4CompatError, printable

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
#: A smaller number without a unit has a forgotten unit.
_FEWEST = 1 << 20
#: A larger number is not a size.
_MOST = 1 << 63
#: The least characters of a column of a table, and of text beside the other columns.
_NARROWEST, _NARROWEST_TEXT = 12, 28
_CODE, _SPACE = re.compile(r"(`+)[^`]+\1"), "\0"
_NAMES = {1000: ("B", "kB", "MB", "GB"), 1024: ("B", "KiB", "MiB", "GiB")}


def parse_size(size: float | str) -> int:
    """Bytes of a size: a number of bytes, or text such as "8GiB", "8GB", "500MB".

    Text without a unit is bytes as well, but a small number ("12") is an error that asks for the unit.

    Raises:
        Gemma4CompatError: it is not a size.
    """
    if isinstance(size, numbers.Real) and not isinstance(size, bool):
        if 0 <= size < _MOST:
            return int(size)
        raise _no_size(size)
    found = re.fullmatch(r"([0-9]{1,20}(?:\.[0-9]{1,20})?) ?([a-z]*)", str(size).strip(), re.IGNORECASE)
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise _no_size(size)
    whole = "." not in found[1]
    if not found[2] and (not whole or 0 < int(found[1]) < _FEWEST):
        raise _no_size(size, f". Without a unit it is in bytes: did you mean {found[1]}GiB?")
    if unit == 1 and not whole:
        raise _no_size(size)
    return int(found[1]) * unit if whole else int(float(found[1]) * unit)


def _no_size(size: Any, hint: str = "") -> Gemma4CompatError:
    if isinstance(size, int) and size.bit_length() > 1000:
        shown = f"a number of {size.bit_length()} bits"
    else:
        shown = repr(size if isinstance(size, numbers.Real) else str(size)[:40])
    return Gemma4CompatError(
        f"{shown} is not a size; write it as 8GiB (binary), 8GB (decimal), 500MB, or in bytes as 8589934592{hint}"
    )


def size_text(nbytes: int, *, up: bool = False) -> str:
    """``nbytes`` in GiB or MiB; ``up``: rounded up, so that the text can be used as a budget."""
    unit, name = (1 << 30, "GiB") if nbytes >= 1 << 30 else (1 << 20, "MiB")
    digits = 100 if name == "GiB" else 1
    scaled = -(-nbytes * digits // unit) if up else round(nbytes * digits / unit)
    return f"{scaled / digits:.{2 if digits == 100 else 0}f} {name}"


def scaled_text(nbytes: int, *, base: int, digits: int) -> str:
    """``nbytes`` in the largest fitting unit of ``base`` 1000 or 1024, for sizes from bytes to gigabytes."""
    value, unit = float(nbytes), "B"
    for unit in _NAMES[base]:
        if value < base or unit == _NAMES[base][-1]:
            break
        value /= base
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.{digits}f} {unit}"


def runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Sorted numbers as (first, last) of consecutive ones: [0, 1, 2, 5] gives [(0, 2), (5, 5)]."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def runs_text(numbers: Sequence[int], separator: str = ", ") -> str:
    """[0, 1, 2, 5] as "0-2, 5"."""
    return separator.join(str(first) if first == last else f"{first}-{last}" for first, last in runs(numbers))


class Tone(str, enum.Enum):
    """How a terminal shows a cell; the value is the code of its colour."""

    PLAIN = ""
    GOOD = "32"
    WARNING = "33"
    BAD = "31"
    DIM = "2"


class Cell(str):
    """A cell of a table that has a tone."""

    tone: Tone

    def __new__(cls, text: str, tone: Tone) -> Cell:
        cell = super().__new__(cls, text)
        cell.tone = tone
        return cell


def table_text(
    rows: Sequence[Sequence[str]], *, header: bool = False, width: int | None = None, colour: bool = False
) -> str:
    """Rows as lines of aligned columns; the last column is free text. ``header`` rules off the first row.

    With a ``width``, in characters, no line is longer: the last column is wrapped under itself, or goes below each row
    where the others leave no room. If that is not enough, the widest of the other columns are wrapped, except the
    first, which holds names. With ``colour``, cells that have a tone and fit on one line are shown in it. Control
    characters in cells are shown as escapes.
    """
    tones = [[cell.tone.value if colour and isinstance(cell, Cell) else "" for cell in row] for row in rows]
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)][:-1]
    if width is None:
        lines = ["  ".join(_painted(row, [*widths, 0], painted)).rstrip() for row, painted in zip(rows, tones)]
        ruler = "  ".join("-" * size for size in [*widths, len(rows[0][-1])])
    else:
        while sum(widths) + 2 * len(widths) > width and max(widths[1:], default=0) > _NARROWEST:
            widest = max(range(1, len(widths)), key=widths.__getitem__)
            widths[widest] -= 1
        room = width - sum(widths) - 2 * len(widths)
        below = room < _NARROWEST_TEXT and max(len(row[-1]) for row in rows) > room
        lines = ["\n".join(_wrapped_row(row, widths, width, one, below=below)) for row, one in zip(rows, tones)]
        ruler = "  ".join("-" * size for size in [*widths, len(rows[0][-1])])[:width].rstrip()
    if header:
        lines.insert(1, ruler)
    return "\n".join(lines)


def _wrapped_row(
    row: Sequence[str], widths: Sequence[int], width: int, tones: Sequence[str], *, below: bool
) -> list[str]:
    cells = [_wrapped(cell, size) for cell, size in zip(row, widths)]
    if not below:
        cells.append(_wrapped(row[-1], max(width - sum(widths) - 2 * len(widths), 1)))
    tones = [tone if len(cell) == 1 else "" for tone, cell in zip(tones, cells)]
    lines = [
        "  ".join(_painted(parts, [*widths, 0], tones)).rstrip()
        for parts in itertools.zip_longest(*cells, fillvalue="")
    ]
    return lines + [f"    {line}" for line in _wrapped(row[-1], max(width - 4, 20))] if below else lines


def counts_text(name: str, found: Mapping[str, tuple[str, str]], columns: Sequence[str], width: int | None) -> str:
    """How many of ``found``, each a row and a column by its id, fall into each; ``name`` is what the rows are."""
    count = Counter(found.values())
    rows = [
        [row, *(str(count[row, column] or "-") for column in columns)]
        for row in dict.fromkeys(row for row, _ in found.values())
    ]
    return table_text([[name, *columns], *rows], header=True, width=width)


def _painted(parts: Sequence[str], widths: Sequence[int], tones: Sequence[str]) -> list[str]:
    """Each part filled up to its width, and in its colour."""
    return [
        (f"\x1b[{tone}m{part}\x1b[0m" if tone and part else part) + " " * (width - len(part))
        for part, width, tone in zip(parts, widths, tones)
    ]


def _wrapped(text: str, width: int) -> list[str]:
    return wrapped(text, width).split("\n")


def paragraphs(text: str, width: int | None) -> str:
    """A docstring's paragraphs as :func:`wrapped`; those with an indented line, or a list, stay as they are."""
    if width is None:
        return text
    parts = text.split("\n\n")
    plain = [not re.search(r"^(?: |[*-] |\d\. )", part, re.MULTILINE) for part in parts]
    return "\n\n".join(wrapped(" ".join(part.split()), width) if one else part for part, one in zip(parts, plain))


def wrapped(text: str, width: int | None) -> str:
    """One line of text as lines no longer than ``width`` (None: unchanged).

    Longer words stay whole. So does what is between backquotes, which a reader pastes.
    """
    if width is None or len(text) <= width:
        return text
    kept = _CODE.sub(lambda code: code[0].replace(" ", _SPACE), text)
    return textwrap.fill(kept, width, break_long_words=False, break_on_hyphens=False).replace(_SPACE, " ")
