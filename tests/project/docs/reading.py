"""The pages, and what is in them: code blocks, links, headings."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.helpers import ROOT

#: Every page that a user reads.
PAGES = sorted(
    [path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"] + [*(ROOT / "docs").rglob("*.md")],
    key=lambda path: (path.parent != ROOT, path.name),
)


@dataclass(frozen=True)
class Block:
    """A fenced code block: its page, the line of its fence (from 1), its language, its text."""

    page: Path
    line: int
    language: str
    code: str

    @property
    def name(self) -> str:
        return f"{self.page.name}:{self.line}"


@functools.cache
def tokens(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))


def blocks(page: Path) -> list[Block]:
    """All code blocks of a page, in order. One that is indented in place of fenced has the language "indented"."""
    found = []
    text = page.read_text(encoding="utf-8")
    if not re.search(r"^ *```|^ {4}", text, re.MULTILINE):
        return []
    for token in MarkdownIt("commonmark").disable("inline").parse(text):  # half the time of tokens()
        if token.type in ("fence", "code_block"):
            language = token.info.strip() if token.type == "fence" else "indented"
            found.append(Block(page, (token.map or [0])[0] + 1, language, token.content))
    return found


def _inline(page: Path) -> Iterator[Token]:
    for token in tokens(page):
        yield from token.children or ()


def links(page: Path) -> list[str]:
    """Where the links and pictures of a page point."""
    found: list[Any] = []
    for token in _inline(page):
        found += [token.attrGet("href")] if token.type == "link_open" else []
        found += [token.attrGet("src")] if token.type == "image" else []
    return [str(target) for target in found]


def pictures(page: Path) -> list[tuple[str, str]]:
    """Text and address of each picture."""
    return [(token.content, str(token.attrGet("src"))) for token in _inline(page) if token.type == "image"]


@functools.cache
def anchors(page: Path) -> set[str]:
    """What a link may name after ``#``: GitHub's rule, which the site follows (mkdocs.yml), and ``<a id="...">``."""
    found = set(re.findall(r'<a id="([^"]+)"></a>', page.read_text(encoding="utf-8")))
    counts: dict[str, int] = {}
    known = tokens(page)
    for index, token in enumerate(known):
        if token.type != "heading_open":
            continue
        text = "".join(child.content for child in known[index + 1].children or ())
        slug = unicodedata.normalize("NFC", text).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", slug).replace(" ", "-")
        number = counts.get(slug, 0)
        counts[slug] = number + 1
        found.add(f"{slug}-{number}" if number else slug)
    return found
