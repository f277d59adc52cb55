"""What makes a reader take gigabytes, minutes or a traceback is one error, in bounded memory and time."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pytest

from tests.helpers import child

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not hasattr(os, "fork") or sys.platform == "darwin", reason="limits that Linux keeps"),
]
if hasattr(os, "fork"):
    from tests.unit.engine.common import hostile

    NAMES = list(hostile.CASES)
else:
    NAMES = []


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, Any]]:
    """How reading each input ended; all in one process that forks, for a tenth of the time."""
    done = child("-m", "tests.unit.engine.common.hostile", timeout=240)
    assert done.code == 0, done.stderr
    return {found["name"]: found for found in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_input_is_bounded_and_at_most_one_error(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    found, (_, message) = outcomes[name], hostile.CASES[name]
    assert found["end"] == ("read" if message is None else "error"), found
    assert (message or "") in found["said"]
    assert len(found["said"]) <= 10_000
    assert found["memory"] <= hostile.MEMORY + hostile.MEMORY_PER_BYTE * found["bytes"]
    assert found["seconds"] <= hostile.SECONDS + hostile.SECONDS_PER_MIB * found["bytes"] / (1 << 20)
