"""A generated part of a page stands between two comments."""

from __future__ import annotations


def between(text: str, begin: str, end: str, content: str) -> str:
    """``text`` with ``content`` on the lines between the comments ``begin`` and ``end``."""
    head, _, rest = text.partition(begin)
    _, found, tail = rest.partition(end)
    if not found:
        raise SystemExit(f"the page lacks {begin} or {end}")
    return f"{head}{begin}\n{content}\n{end}{tail}"
