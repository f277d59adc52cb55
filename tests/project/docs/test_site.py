"""The site: every page is on it, API.md names everything public, it is built without warnings and fetches nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gemma4_compat
from tests.helpers import ROOT
from tests.project.docs import reading

CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r": (\w[\w/-]*\.(?:md|ipynb))$", CONFIG.partition("\nnav:\n")[2], re.MULTILINE)
    assert len(listed) == len(set(listed))
    there = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert set(listed) == there | {"CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"}


def test_the_api_page_names_everything_public() -> None:
    page = (ROOT / "docs" / "API.md").read_text(encoding="utf-8")
    named = {*re.findall(r"^::: gemma4_compat\.(\w+)$", page, re.MULTILINE), "patches", "__version__"}
    assert "\n### patches\n" in page
    assert named == set(gemma4_compat.__all__)


def test_the_start_page_has_the_readmes_script() -> None:
    scripts = [
        max((block.code for block in reading.blocks(ROOT / name) if block.language == "python"), key=len)
        for name in ("README.md", "docs/index.md")
    ]
    assert scripts[0] == scripts[1]


@pytest.mark.full
def test_it_is_built_without_warnings_and_fetches_nothing(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs MkDocs: pip install 'gemma4-compat[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 30
    fetched = re.compile(r'<(?:script|img|iframe)\b[^>]*\bsrc="(?:https?:)?//|<link\b(?=[^>]*stylesheet)[^>]*//')
    assert fetched.search('<script src="https://unpkg.com/x"></script>')
    for page in pages:
        assert fetched.search(page.read_text(encoding="utf-8")) is None, page.name
