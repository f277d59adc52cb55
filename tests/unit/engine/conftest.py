"""No settings of the person who runs the tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISABLE", "ENABLE", "STRICT"):
        monkeypatch.delenv(f"GEMMA4_COMPAT_{name}", raising=False)
