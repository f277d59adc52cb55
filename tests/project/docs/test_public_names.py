"""Examples and notebooks show what users may write: public names only, and no flag that does nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers import ROOT

SHOWN = sorted([*(ROOT / "examples").glob("*.py"), *(ROOT / "docs" / "notebooks").glob("*.ipynb")])
PRIVATE = re.compile(r"gemma4_compat(?:\.\w+)*\._\w+|from gemma4_compat(?:\.\w+)* import [^\n]*\b_\w+")


@pytest.mark.parametrize("path", [pytest.param(path, id=path.name) for path in SHOWN])
def test_an_example_uses_public_names_only(path: Path) -> None:
    assert PRIVATE.findall(path.read_text(encoding="utf-8")) == []


def test_a_private_name_would_be_found() -> None:
    for line in (
        "from gemma4_compat._plan import text",
        "from gemma4_compat import _graphs",
        "gemma4_compat._x.y()",
    ):
        assert PRIVATE.search(line), line
    assert PRIVATE.search("from gemma4_compat import testing\nos._exit") is None


def test_a_load_inside_quantize_offloaded_has_no_flag_for_offloading() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.py")]
    inside = re.compile(r"quantize\(offloaded=True[^)]*\):.*\n(?: .*\n|\n)*? .*llm_int8_enable_fp32_cpu_offload")
    assert [path.name for path in pages if inside.search(path.read_text(encoding="utf-8"))] == []
