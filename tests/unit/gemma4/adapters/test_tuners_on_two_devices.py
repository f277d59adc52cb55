"""Every tuner of PEFT, and prefixes, on a model whose layers are on two devices: bit for bit those of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

from gemma4_compat._lab.stand_ins import second_device
from tests.conftest import is_affected, patch
from tests.helpers import ROOT, Finished
from tests.unit.gemma4.adapters.test_tuners_on_split_models import OUTSIDE_LAYERS, PREFIXES, TUNERS, configuration

pytestmark = pytest.mark.skipif(not second_device.available(), reason="this PyTorch takes no backend in Python")
prefixed = pytest.mark.skipif(
    not is_affected(patch("peft-prefix-placement")), reason="this PEFT has no prefix for layers of several widths"
)
#: Its merge is computed in float32 on a CPU and in bf16 elsewhere: the two devices are not of a kind.
OTHERWISE_ROUNDED = ("PSOFT",)
#: Of each repair one, in the fast suite.
FIRST = ("ADALORA", "LILY", "RANDLORA", "head")


@pytest.fixture
def as_on_one_device(workspace: Any, warm_child: Callable[..., Finished]) -> Callable[[str], None]:
    """A process for each case: the second device stays registered."""

    def check(case: str) -> None:
        done = warm_child(str(ROOT / "tests/unit/gemma4/adapters/two_devices.py"), str(workspace.folder), case)
        assert done.stdout.endswith("as on one device\n"), done.stderr[-3000:]

    return check


@pytest.mark.parametrize(
    "tuner",
    [
        pytest.param(name, marks=() if name in FIRST else pytest.mark.full)
        for name in (*TUNERS, *OUTSIDE_LAYERS)
        if name not in OTHERWISE_ROUNDED
    ],
)
def test_two_devices_are_tuned_as_one(as_on_one_device: Callable[[str], None], tuner: str) -> None:
    configuration(tuner)  # skips what this PEFT does not have
    as_on_one_device(tuner)


@prefixed
@pytest.mark.parametrize("kind", PREFIXES)
def test_a_prefix_is_on_the_device_of_its_layer(as_on_one_device: Callable[[str], None], kind: str) -> None:
    as_on_one_device(kind)
