"""What tests on two devices run in a process of its own: python tests/unit/gemma4/adapters/two_devices.py FOLDER CASE

FOLDER is a workspace; the second device is emulated, see ``second_device``. CASE is a tuner, a kind of prefix, or an
adapter on what is in no layer.
"""

from __future__ import annotations

import gemma4_compat  # noqa: F401  # isort: skip  (first, as a user would)

import functools
import sys
import tempfile
from pathlib import Path
from typing import Any

from gemma4_compat._lab import tiny
from gemma4_compat._lab.stand_ins import second_device
from gemma4_compat._lab.workspace import Workspace
from tests.unit.gemma4.adapters.test_tuners_on_split_models import (
    APART,
    OUTSIDE_LAYERS,
    PREFIXES,
    SUMMED,
    answers,
    assert_prefixed_as_on_one_device,
    assert_same,
    assert_tuned_as_on_one_device,
    tuned,
)


def split(workspace: Workspace, there: list[str] | None = None) -> Any:
    """``there`` on the second device, the rest on the first; if None, layers on both, some of them readers of the
    other's keys and values.
    """
    model = tiny.dispatch_to_two(workspace.load(), second_device.DEVICE, there)
    assert {weight.device.type for weight in model.parameters()} == {"cpu", second_device.TYPE}
    return model


def assert_dispatched_later_as_on_one_device(workspace: Workspace, case: str, there: list[str]) -> None:
    """With an adapter that was there before the model was dispatched."""
    expected, found = (tuned(workspace.load(), case) for _ in range(2))
    tiny.dispatch_to_two(found.get_base_model(), second_device.DEVICE, there)
    for mine, theirs in zip(answers(found, workspace), answers(expected, workspace), strict=True):
        assert_same(mine, theirs)


def main(folder: str, case: str) -> None:
    workspace = Workspace(Path(folder))
    bound = SUMMED.get(case, 0.0)
    with second_device.second_device():
        if case in PREFIXES:
            assert_prefixed_as_on_one_device(workspace, case, lambda: split(workspace), "cpu")
            placements: tuple[list[str] | None, ...] = ()
        else:
            placements = APART if case in (*OUTSIDE_LAYERS, "TRAINABLE_TOKENS") else (None,)
        for there in placements:
            to = Path(tempfile.mkdtemp(dir=folder))
            assert_tuned_as_on_one_device(
                workspace, to, case, functools.partial(split, workspace, there), gradients_within=bound
            )
            if there is not None:
                assert_dispatched_later_as_on_one_device(workspace, case, there)
    print("as on one device")


if __name__ == "__main__":
    main(*sys.argv[1:])
