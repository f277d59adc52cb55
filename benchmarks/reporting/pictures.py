"""Bar charts as SVG: text that a test can compare, in colours of the page they are on, light or dark.

No library draws them, so they are the same bytes everywhere. A browser takes the colour scheme for a picture from the
page around it (``prefers-color-scheme``), so one file serves both.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

#: Of a picture, and of one that a phone shows as well; what follows is in its pixels.
WIDTH, NARROW = 800, 520
TITLE_HEIGHT, HEADING_HEIGHT, LINE_HEIGHT, BAR_HEIGHT, AXIS_HEIGHT = 28, 20, 14, 14, 22
#: Between two rows, around panels, and for the figure at the end of a bar.
GAP, SPACE, FIGURE_WIDTH = 8, 16, 46
#: Of a letter, at most on average: fonts differ.
LETTER = 6.9
#: Letters in a line of a label.
LABEL = 48
#: Kind of bar -> colours on a light and on a dark page: at least 3 to 1 against it, as WCAG 2 asks of graphics.
COLOURS = {
    "ours": ("#2f6fbf", "#6aa5e8"),
    "upstream": ("#b4532a", "#e0855c"),
    "other": ("#6f6f6f", "#a0a0a0"),
    "reference": ("#6f6f6f", "#a0a0a0"),
}
NAMES = {
    "ours": "with gemma4_compat",
    "upstream": "upstream",
    "other": "other software",
    "reference": "everything on the GPU",
}
#: Text and lines, on a light and on a dark page.
INK = ("#333333", "#d8d8d8")


@dataclass(frozen=True)
class Panel:
    """A column of bars with a scale of its own.

    Attributes:
        heading: what the bars show, with the unit.
        line: a value to mark over all bars, or None.
        kind: of all its bars; empty for those of the rows.
    """

    heading: str = ""
    line: float | None = None
    kind: str = ""


@dataclass(frozen=True)
class Row:
    """One bar in each panel.

    Attributes:
        label: one line or several.
        kind: a key of :data:`COLOURS`.
        values: of each panel; None leaves it empty.
        intervals: of each panel, the ends of what the value may be as well; or nothing.
    """

    label: str
    kind: str
    values: tuple[float | None, ...]
    intervals: tuple[tuple[float, float] | None, ...] = ()


def chart(title: str, panels: Sequence[Panel], rows: Sequence[Row], total: int = WIDTH) -> str:
    """The picture: rows from top to bottom, panels from left to right, in a width of ``total``."""
    lines = [[part for line in row.label.split("\n") for part in textwrap.wrap(line, LABEL) or [""]] for row in rows]
    label_width = SPACE + LETTER * max(len(line) for label in lines for line in label)
    width = (total - label_width - SPACE * len(panels)) / len(panels)
    heights = [max(BAR_HEIGHT, LINE_HEIGHT * len(label)) + GAP for label in lines]
    drawn = {panel.kind or row.kind for panel in panels for row in rows}
    kinds = [kind for kind in COLOURS if kind in drawn]
    top = TITLE_HEIGHT + HEADING_HEIGHT * (1 + any(panel.heading for panel in panels))
    bottom = top + sum(heights)
    parts = [_text(SPACE, 18, title, "title"), *_legend(kinds)]
    for index, panel in enumerate(panels):
        left = label_width + SPACE + index * (width + SPACE)
        parts += _panel(panel, index, rows, heights, left, width - FIGURE_WIDTH, top)
    middle = top
    for label, height in zip(lines, heights):
        first = middle + (height - GAP - LINE_HEIGHT * len(label)) / 2 + LINE_HEIGHT - 3
        parts += [_text(label_width, first + LINE_HEIGHT * at, line, "label") for at, line in enumerate(label)]
        middle += height
    height = bottom + AXIS_HEIGHT
    described = "; ".join(
        f"{' '.join(row.label.split())}: {', '.join('-' if one is None else f'{one:.2f}' for one in row.values)}"
        for row in rows
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {height:.0f}" width="{total}" '
        f'height="{height:.0f}" role="img" font-family="system-ui, sans-serif" font-size="11.5">'
    )
    return "\n".join(
        [head, f"<title>{escape(title)}</title>", f"<desc>{escape(described)}</desc>", _style(), *parts, "</svg>\n"]
    )


def _style() -> str:
    def colours(at: int) -> str:
        bars = "".join(f".{kind}{{fill:{both[at]}}}" for kind, both in COLOURS.items())
        return f"text{{fill:{INK[at]}}}line{{stroke:{INK[at]}}}{bars}"

    return (
        f"<style>{colours(0)}.title{{font-size:14px;font-weight:600}}.label{{text-anchor:end}}"
        f".tick{{text-anchor:middle;font-size:10.5px}}.grid{{opacity:.25}}.mark{{opacity:.6;stroke-dasharray:3 2}}"
        f"@media (prefers-color-scheme:dark){{{colours(1)}}}</style>"
    )


def _legend(kinds: Sequence[str]) -> list[str]:
    parts, left = [], float(SPACE)
    for kind in kinds:
        parts.append(f'<rect class="{kind}" x="{left:.1f}" y="{TITLE_HEIGHT}" width="12" height="12"/>')
        parts.append(_text(left + 17, TITLE_HEIGHT + 10, NAMES[kind]))
        left += 17 + LETTER * len(NAMES[kind]) + SPACE
    return parts


def _panel(
    panel: Panel, index: int, rows: Sequence[Row], heights: Sequence[int], left: float, width: float, top: float
) -> list[str]:
    ends = [_ends(row, index) for row in rows]
    low = min(0.0, panel.line or 0.0, *(end for pair in ends for end in pair))
    high = max(0.0, panel.line or 0.0, *(end for pair in ends for end in pair))
    step = _step(high - low)
    while (high - low) / step * LETTER * (len(f"{high:.0f}") + 1) > width:  # numbers beside each other
        step *= 2
    low, high = math.floor(low / step) * step, max(math.ceil(high / step), math.floor(low / step) + 1) * step
    above, bottom = top - 2, top + sum(heights)

    def place(value: float) -> float:
        return left + width * (value - low) / (high - low)

    parts = [_text(left, top - 7, panel.heading)] if panel.heading else []
    for number in range(round((high - low) / step) + 1):
        at = place(low + number * step)
        parts.append(f'<line class="grid" x1="{at:.1f}" y1="{above}" x2="{at:.1f}" y2="{bottom}"/>')
        parts.append(_text(at, bottom + 15, f"{low + number * step:g}", "tick"))
    for row, pair, height in zip(rows, ends, heights):
        value = row.values[index]
        middle = top + (height - GAP) / 2
        top += height
        if value is None:
            continue
        begin, end = sorted((place(0.0), place(value)))
        parts.append(
            f'<rect class="{panel.kind or row.kind}" x="{begin:.1f}" y="{middle - BAR_HEIGHT / 2:.1f}" '
            f'width="{max(end - begin, 1):.1f}" height="{BAR_HEIGHT}"/>'
        )
        if pair[0] != pair[1]:
            first, last = place(pair[0]), place(pair[1])
            parts.append(f'<line x1="{first:.1f}" y1="{middle}" x2="{last:.1f}" y2="{middle}" stroke-width="2"/>')
        parts.append(
            _text(place(max(0.0, value, *pair)) + 5, middle + 4, f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}")
        )
    parts.append(f'<line x1="{place(0.0):.1f}" y1="{above}" x2="{place(0.0):.1f}" y2="{bottom}"/>')
    if panel.line is not None:
        at = place(panel.line)
        parts.append(f'<line class="mark" x1="{at:.1f}" y1="{above}" x2="{at:.1f}" y2="{bottom}"/>')
    return parts


def _ends(row: Row, index: int) -> tuple[float, float]:
    """What the panel has to have room for."""
    value = row.values[index] or 0.0
    return (row.intervals[index] if index < len(row.intervals) else None) or (value, value)


def _step(span: float) -> float:
    """1, 2 or 5 times a power of ten, for four to eight lines."""
    rough = (span or 1.0) / 5
    power = 10 ** math.floor(math.log10(rough))
    return float(next(times * power for times in (1, 2, 5, 10) if times * power >= rough * 0.999))


def _text(x: float, y: float, text: str, kind: str | None = None) -> str:
    shown = "" if kind is None else f'class="{kind}" '
    return f'<text {shown}x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
