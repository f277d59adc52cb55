"""docs/FAILURE_POINTS.md: what a person writes there, and below each heading the patches that name it.

By hand are the head of the page, the headings and what a repair must show. `python tools/docs.py` writes the lists.
"""

from __future__ import annotations

import functools
import re

import gemma4_compat
from tools.pages import errors
from tools.pages.markers import ROOT, slug

PAGE = ROOT / "docs" / "FAILURE_POINTS.md"
LIST = "- **Repaired by:**"


def page() -> str:
    """The page, with the list of every failure point as the patches say."""
    parts = re.split(r"(?m)^(?=### F\d)", PAGE.read_text(encoding="utf-8"))
    known = {_number(part) for part in parts[1:]}
    for patch in gemma4_compat.patches():
        if unknown := [point for point in patch.failure_points if point not in known]:
            raise SystemExit(f"docs/FAILURE_POINTS.md has no heading for {', '.join(unknown)} of {patch.id}")
    return (parts[0] + "".join(map(_section, parts[1:]))).rstrip() + "\n"


def _number(section: str) -> str:
    return section.removeprefix("### ").partition(":")[0]


def _section(section: str) -> str:
    """A failure point with its list; a heading of the next area, which follows the last one of an area, stays."""
    section, area, rest = section.partition("\n## ")
    written = section.partition(LIST)[0].rstrip()
    rows = [
        f"  - [`{patch.id}`]({errors.entry(patch)})"
        for patch in sorted(gemma4_compat.patches(), key=lambda patch: patch.id)
        if _number(section) in patch.failure_points
    ]
    return "\n".join([written, *([LIST, *rows] if rows else [])]) + "\n\n" + (f"## {rest}" if area else "")


@functools.cache
def anchors() -> dict[str, str]:
    """Failure point -> what a link to its entry names after ``#``."""
    headings = re.findall(r"(?m)^### (F\d+)(.*)", PAGE.read_text(encoding="utf-8"))
    return {number: slug(number + title) for number, title in headings}


def link(point: str, to: str = "") -> str:
    """A link to a failure point; ``to`` leads to docs/."""
    return f"[{point}]({to}FAILURE_POINTS.md#{anchors()[point]})"
