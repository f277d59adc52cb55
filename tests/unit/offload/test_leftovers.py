"""A deleted split model leaves no memory, file, hook or thread behind; ``tests.unit.offload.leftovers`` loads 20."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.offload import leftovers, threads


@pytest.mark.full
@pytest.mark.parametrize("quantization", [None, "4bit-double"])
@pytest.mark.parametrize("store", threads.STORES)
def test_nothing_is_left_of_a_deleted_model(workspace: Any, store: str, quantization: str | None) -> None:
    found = leftovers.check(workspace, store, quantization, loads=3)
    assert found["left"] == {}
    assert found["alive"] == {}
    assert found["files mapped"] == 0
