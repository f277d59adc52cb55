from __future__ import annotations

from typing import Any

import pytest

from gemma4_compat._offload.transfer import row_lookup, streaming


@pytest.fixture(params=["disk", "memory"])
def store(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def streamers(monkeypatch: pytest.MonkeyPatch) -> list[streaming.LayerStreamer]:
    """Every streamer that is created while the test runs."""
    created: list[streaming.LayerStreamer] = []
    original = streaming.LayerStreamer.__init__

    def noted(self: streaming.LayerStreamer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        created.append(self)

    monkeypatch.setattr(streaming.LayerStreamer, "__init__", noted)
    return created


@pytest.fixture(params=["in place", "rows"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """On the CPU an embedding is looked up in place; *rows* is forced."""
    if request.param == "rows":
        monkeypatch.setattr(row_lookup.Lookup, "in_place", False)
    return str(request.param)
