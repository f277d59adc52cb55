"""No settings of the person who runs the tests, and files for ``gemma4-compat needed`` to read."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemma4_compat import Patch
from gemma4_compat._needed import judge
from tests.unit.needed.helpers import PATCHES, Ask


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISABLE", "ENABLE", "STRICT"):
        monkeypatch.delenv(f"GEMMA4_COMPAT_{name}", raising=False)


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """``ask(text, *patches)``: the assessment of a file of that text (default: all patches of the package)."""

    def asked(text: str, *patches: Patch, name: str = "requirements.txt", **others: str) -> judge.Assessment:
        for other, content in {name: text, **{f"{key}.txt": value for key, value in others.items()}}.items():
            (tmp_path / other).write_text(content, encoding="utf-8")
        return judge.assess(tmp_path / name, patches or tuple(PATCHES.values()))

    return asked
