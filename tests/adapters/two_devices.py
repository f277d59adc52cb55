"""What tests on two devices run in a process of its own: python -m tests.adapters.two_devices FOLDER CASE

FOLDER is a workspace; the second device is emulated, see ``second_device``. CASE is a tuner, or a kind of prefix.
"""

from __future__ import annotations

import gemma4_compat  # noqa: F401  # isort: skip  (first, as a user would)

import sys
import tempfile
from pathlib import Path
from typing import Any

from gemma4_compat._reproduction import second_device, tiny
from gemma4_compat._reproduction.workspace import Workspace
from tests.adapters.test_tuners_on_split_models import (
    PREFIXES,
    SUMMED,
    assert_prefixed_as_on_one_device,
    assert_tuned_as_on_one_device,
)


def split(workspace: Workspace) -> Any:
    """Layers on both devices, some of them readers of the other's keys and values; the rest on the first."""
    model = tiny.dispatch_to_two(workspace.load(), second_device.DEVICE)
    assert {weight.device.type for weight in model.parameters()} == {"cpu", second_device.TYPE}
    return model


def main(folder: str, case: str) -> None:
    workspace = Workspace(Path(folder))
    with second_device.second_device():
        if case in PREFIXES:
            assert_prefixed_as_on_one_device(workspace, case, lambda: split(workspace), "cpu")
        else:
            to = Path(tempfile.mkdtemp(dir=folder))
            bound = SUMMED.get(case, 0.0)
            assert_tuned_as_on_one_device(workspace, to, case, lambda: split(workspace), gradients_within=bound)
    print("as on one device")


if __name__ == "__main__":
    main(*sys.argv[1:])
