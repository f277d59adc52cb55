"""The second device does what another GPU does, so that tests with it mean something."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from gemma4_compat._lab.stand_ins import second_device
from tests.helpers import child

pytestmark = pytest.mark.skipif(not second_device.available(), reason="this PyTorch takes no backend in Python")


def test_it_is_a_device() -> None:
    cases = ["copies", "mixing", "views", "gradients", "attention"]
    done = child("-m", "tests.unit.lab.second_device_child", *cases)
    assert done.stdout.splitlines() == [f"{case} passed" for case in cases], done.stderr[-4000:]
