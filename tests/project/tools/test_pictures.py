"""Bar charts: no text over another, none outside, colours that can be told from the page, values as they are."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks.reporting import pictures
from benchmarks.reporting.pictures import Panel, Row, chart

ROOT = Path(__file__).resolve().parents[3]

SVG = "{http://www.w3.org/2000/svg}"
#: Backgrounds of the site, light and dark, and of GitHub.
PAGES = (("#ffffff",), ("#1e2129", "#0d1117"))
#: Pixels of a letter on average, in the widest font that was seen: DejaVu Sans of 11.5 pixels, Chromium on Debian.
LETTER = 6.9
DRAWN = sorted((ROOT / "docs").rglob("*.svg"))


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=("light", "dark"))
def test_colours_show_on_the_page(scheme: int) -> None:
    for page in PAGES[scheme]:
        assert contrast(pictures.INK[scheme], page) >= 4.5
        for both in pictures.COLOURS.values():
            assert contrast(both[scheme], page) >= 3.0


def boxes(text: str) -> list[tuple[str, float, float, float, float]]:
    """Text, left, right, top and bottom of every text in a picture, as wide as letters are at most."""
    found = []
    for item in ET.fromstring(text).iter(f"{SVG}text"):
        said, kind = item.text or "", item.get("class")
        width = LETTER * len(said) * (1.25 if kind == "title" else 1.0)
        left, bottom = float(item.attrib["x"]), float(item.attrib["y"])
        left -= {"label": width, "tick": width / 2}.get(kind or "", 0.0)
        if said:
            found.append((said, left, left + width, bottom - 10, bottom + 2))
    return found


@pytest.mark.parametrize("file", DRAWN, ids=lambda file: file.stem)
def test_no_text_is_over_another_or_outside(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    width, height = map(float, re.findall(r'viewBox="0 0 (\d+) (\d+)"', text)[0])
    found = boxes(text)
    assert len(found) > 5
    for index, (said, left, right, top, bottom) in enumerate(found):
        assert left >= 0, said
        assert right <= width, said
        assert bottom <= height, said
        for other, start, end, over, under in found[:index]:
            apart = right <= start or end <= left or bottom <= over or under <= top
            assert apart, f"{said!r} is over {other!r}"


def test_bars_are_as_long_as_their_values() -> None:
    rows = [Row("a\nb", "ours", (1.0, 8.0), ((0.5, 1.5), None)), Row("c & d", "upstream", (2.0, None))]
    text = chart("Title <1>", (Panel("one", 1.0), Panel("two")), rows)
    root = ET.fromstring(text)
    bars = {
        kind: [float(bar.attrib["width"]) for bar in root.iter(f"{SVG}rect") if bar.get("class") == kind][1:]
        for kind in ("ours", "upstream")
    }
    assert bars["upstream"] == [pytest.approx(2 * bars["ours"][0], abs=0.2)]
    assert len(bars["ours"]) == 2
    assert root.findtext(f"{SVG}desc") == "a b: 1.00, 8.00; c & d: 2.00, -"
    assert "prefers-color-scheme:dark" in text


@pytest.mark.parametrize("values", [(-3.0, 0.5), (0.0, 0.0), (1e-6, 2e-6), (9999.0, 1.0)])
def test_any_values_are_drawn_inside(values: tuple[float, ...]) -> None:
    text = chart("x", (Panel(),), [Row("row", "ours", (value,)) for value in values])
    for bar in ET.fromstring(text).iter(f"{SVG}rect"):
        assert 0 <= float(bar.attrib["x"]) <= pictures.WIDTH - float(bar.attrib["width"])
