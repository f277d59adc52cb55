"""Links of README and docs lead somewhere, pictures have a text, and every page is on the site."""

from __future__ import annotations

from pathlib import Path

import gemma4_compat
from tests.collecting import collect_failures
from tests.helpers import ROOT
from tests.project.docs import reading
from tools.pages import errors

PAGES = [*reading.PAGES, ROOT / "CHANGELOG.md"]


def broken(page: Path) -> list[str]:
    found = []
    for link in reading.links(page):
        if link.startswith(("https://", "http://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in reading.anchors(target)):
            found.append(link)
    return found


@collect_failures(page=PAGES)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "PAGE.md"
    page.write_text("# A *b* `c`: d\n\n[1](#a-b-c-d) [2](#a) [3](PAGE.md#a-b-c-d) [4](NONE.md) ![5](none.png)\n")
    assert broken(page) == ["#a", "NONE.md", "none.png"]


@collect_failures(page=PAGES)
def test_pictures_have_a_text(page: Path) -> None:
    assert [src for text, src in reading.pictures(page) if len(text) < 20] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


@collect_failures(page=PAGES[:-1])  # the changelog only grows
def test_no_page_is_too_long_to_read(page: Path) -> None:
    assert page.stat().st_size <= 60_000


def test_every_patch_has_an_anchor_in_the_list_and_an_entry() -> None:
    """Links from outside, such as docs/PATCHES.md#peft-keep-dispatch, still lead to it."""
    listed = reading.anchors(ROOT / "docs" / "PATCHES.md")
    for patch in gemma4_compat.patches():
        assert patch.id in listed
        assert patch.id in reading.anchors(ROOT / "docs" / errors.entry(patch).partition("#")[0])


def test_the_readme_has_no_word_that_only_this_project_knows() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("constraints/thread.txt", "").lower()
    assert [word for word in ("seam", "thread", " cell", " pager", "bridges") if word in text] == []
