"""MkDocs' hook for the site: pages from the root of the repository, and links to files that are not on the site.

CHANGELOG, CONTRIBUTING and SECURITY become pages. Other links that leave docs/ go to the repository's address
(``gemma4_compat/_engine/io/address.py``), or stay plain text if it has none. The page "Find the error" gets a
box for a pasted error (docs/errors.js). Cells of tables know their column, because phones show a row as a list
(docs/site.css).
"""

from __future__ import annotations

import html
import json
import posixpath
import re
import runpy
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = runpy.run_path(str(ROOT / "gemma4_compat" / "_engine" / "io" / "address.py"))["REPOSITORY"]
FROM_ROOT = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
#: Pages that answer a question come first in the search, those that list everything last: `nox -s site_check`.
BOOST = {
    "SETTINGS.md": 30,
    **dict.fromkeys(("MERGING.md", "READERS.md", "SMALL_CARD.md", "TRAINING.md"), 3),
    "DECODING.md": 5,
    **dict.fromkeys(("API.md", "CHANGELOG.md", "FAILURE_POINTS.md", "JSON.md", "VARIANTS.md"), 0.4),
}

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?![a-z]+:|#)([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from the root, with links as docs/ has them."""
    for name in FROM_ROOT:
        text = (ROOT / name).read_text(encoding="utf-8")
        text = _LINK.sub(lambda found: f"{found[1]}[{found[2]}]({_seen_from_docs(found[3])})", text)
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Mend the links of a page, and say how high the search puts it."""
    usual = {"": 1, "patches": 0.7}.get(posixpath.dirname(page.file.src_path), 0.4)
    page.meta.setdefault("search", {"boost": BOOST.get(page.file.src_path, usual)})
    return _LINK.sub(lambda found: _link(found, files, posixpath.dirname(page.file.src_path)), markdown)


def on_page_content(content: str, page: Any, config: Any, files: Files) -> str:
    """Docstrings name classes as Sphinx does (``:class:`Plan```); the role goes, the code stays."""
    content = re.sub(r":(?:attr|class|data|exc|func|meth|mod):(?=<code>)", "", content)
    if page.file.src_path == "ERRORS.md":
        content = content.replace("</h1>", f"</h1>{_box()}", 1)
    if page.file.src_path == "PATCHES.md":
        content = content.replace("<ul>\n<li><a id=", '<ul class="errors">\n<li><a id=')
    return _TABLE.sub(lambda found: labelled(found.group()), content)


_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_ROW, _HEAD = re.compile(r"<tr>.*?</tr>", re.DOTALL), re.compile(r"<th\b[^>]*>(.*?)</th>", re.DOTALL)


def labelled(table: str) -> str:
    """A table whose cells have the text above their column as ``data-label``."""
    heads = [html.escape(html.unescape(re.sub(r"<[^>]+>", "", head)).strip()) for head in _HEAD.findall(table)]

    def row(found: re.Match[str]) -> str:
        left = iter(heads)
        return re.sub(r"<td\b", lambda cell: f'{cell.group()} data-label="{next(left, "")}"', found.group())

    return _ROW.sub(row, table)


def _box() -> str:
    """The box of "Find the error", which its script shows, and what is known, without what would end the script."""
    sys.path.insert(0, str(ROOT))
    from tools.pages import errors_box

    known = json.dumps(errors_box.known(), separators=(",", ":")).replace("</", "<\\/")
    return (
        '<label class="pasted" for="pasted-error" hidden>Paste the error, or the whole traceback. '
        "It stays in your browser."
        '<textarea id="pasted-error" rows="6" spellcheck="false" autocomplete="off"></textarea></label>'
        '<div id="error-answer" aria-live="polite"></div>'
        f'<script type="application/json" id="known-errors">{known}</script><script src="errors.js" defer></script>'
    )


def _seen_from_docs(target: str) -> str:
    return target.removeprefix("docs/") if target.startswith("docs/") else f"../{target}"


def _link(found: re.Match[str], files: Files, folder: str) -> str:
    picture, text, target = found.groups()
    path, _, anchor = target.partition("#")
    if folder:  # as it is written on a page of docs/
        path = posixpath.normpath(posixpath.join(folder, path))
    inside = path.removeprefix("../")
    if path == "../README.md":
        return f"[{text}](index.md)"
    if inside in FROM_ROOT:
        return f"[{text}]({inside}{'#' * bool(anchor)}{anchor})"
    if files.get_file_from_path(path) is not None or picture or not (ROOT / "docs" / path).exists():
        return found.group()  # MkDocs' own; where it leads nowhere, the build fails
    if REPOSITORY:
        full = path.removeprefix("../") if path.startswith("../") else f"docs/{path}"
        return f"[{text}]({REPOSITORY}/blob/main/{full})"
    return text if text != "raw" else f"`{inside if path.startswith('../') else 'docs/' + path}`"
