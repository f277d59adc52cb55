"""The forks in which the tests run reproductions say what processes of their own would say."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._doctor import children
from gemma4_compat._doctor.children import Forks


@pytest.fixture(params=["", "all"], ids=["shim on", "shim off"])
def disabled(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def forks(workspace: Any, disabled: str) -> Iterator[Forks]:
    import torch

    if sys.platform != "linux" or torch.cuda.is_available():
        pytest.skip("no forks on this system, or a GPU, which does not survive one")
    with Forks(workspace.folder, disabled) as forks:
        yield forks


def test_a_fork_says_what_a_process_of_its_own_says(workspace: Any, forks: Forks, disabled: str) -> None:
    found = forks("no-such-patch")  # one that dies, and the next is none the worse
    assert found["defect"] is True
    assert found["detail"] == "the process ended with 1: KeyError: 'no-such-patch'"
    command = "accelerate-map-check" if disabled else "accelerate-map-check:reverted"
    found, alone = forks(command), children.alone(command, workspace.folder, disabled=disabled)
    assert {**found, "seconds": 0} == {**alone, "seconds": 0}


def test_a_process_that_cannot_import_the_libraries_is_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "accelerate.py").write_text("raise ImportError('half an installation')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    with Forks(tmp_path) as forks:
        for _ in range(2):
            found = forks("accelerate-map-check")
            assert found["defect"] is True
            assert found["detail"] == "the process ended with 1: ImportError: half an installation"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks on this system")
def test_a_reproduction_that_hangs_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    monkeypatch.setattr(children, "TIMEOUT", 0.1)
    assert children._read(reader, child) is None
    os.close(writer)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
