"""Fake distributions for this process. Nothing here needs torch or any library that the package repairs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import Library


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISABLE", "ENABLE", "STRICT"):
        monkeypatch.delenv(f"GEMMA4_COMPAT_{name}", raising=False)


@pytest.fixture
def create(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Library]]:
    """``create(...)``: a :class:`Library` of a name of its own, importable until the test ends."""
    made: list[Library] = []

    def make(**options: Any) -> Library:
        made.append(Library.create(tmp_path, **options))
        return made[-1]

    monkeypatch.syspath_prepend(tmp_path)
    yield make
    for library in made:
        for name in [name for name in sys.modules if name.partition(".")[0] == library.name]:
            del sys.modules[name]


@pytest.fixture
def library(create: Callable[..., Library]) -> Library:
    """The usual one: version 1.0, everything in its module ``core``."""
    return create()
