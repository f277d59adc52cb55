"""The forks in which the tests run reproductions say what processes of their own would say."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from gemma4_compat import _doctor
from tests.reproductions import Forks


@pytest.fixture(params=["", "all"], ids=["shim on", "shim off"])
def disabled(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def forks(workspace: Any, disabled: str) -> Iterator[Forks]:
    import torch

    if not hasattr(os, "fork") or torch.cuda.is_available():
        pytest.skip("no forks on this system, or a GPU, which does not survive one")
    with Forks(workspace.folder, disabled) as forks:
        yield forks


def test_a_fork_says_what_a_process_of_its_own_says(workspace: Any, forks: Forks, disabled: str) -> None:
    found = forks("no-such-patch")  # one that dies, and the next is none the worse
    assert found["defect"] is True
    assert found["detail"] == "the process ended with 1"
    command = "accelerate-map-check" if disabled else "accelerate-map-check:reverted"
    found, alone = forks(command), _doctor._child(command, workspace.folder, disabled=disabled)
    assert {**found, "seconds": 0} == {**alone, "seconds": 0}
