from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

from gemma4_compat._graphs import recording
from gemma4_compat._kernels import card_memory, kernels, programs
from tests.unit.generation.calls import Models


@pytest.fixture(autouse=True)
def nothing_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test finds out whether a kernel dequantizes weights: those of the test before may be released."""
    monkeypatch.setattr(kernels, "_kernels", {})


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[kernels.Kernels]:
    """The kernels of the CPU, which an emulator runs."""
    import torch

    from tests.unit.kernels.host_kernels import HostCompiler

    reason = HostCompiler.unsupported_reason()
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setitem(kernels.COMPILERS, "cpu", HostCompiler)
    device = torch.device("cpu")
    yield kernels.Kernels(device)
    kernels._kernels.pop(device, None)


@pytest.fixture
def change_file(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, str], None]:
    """A function that replaces text in a file of ``_kernels/cuda``, for this test."""

    def change(name: str, before: str, after: str) -> None:
        headers = programs.headers()
        assert before in headers[name]
        changed = headers | {name: headers[name].replace(before, after)}
        monkeypatch.setattr(programs, "headers", lambda: changed)

    return change


@pytest.fixture
def tapes() -> Iterator[Any]:
    """Steps on the CPU are recorded, by a class whose methods tests may replace."""
    from gemma4_compat._lab.stand_ins.tape import Tape, standing_in

    class OneAtATime(Tape):
        """As :class:`recording.CudaRecording`: who comes second waits."""

        _capturing = threading.Lock()

        def capture(self, run: Callable[[], Any]) -> Any:
            with self._capturing:
                return super().capture(run)

    # Not by the test's own patches, which it may undo before it ends.
    with mock.patch.dict(recording.RECORDERS, cpu=OneAtATime), standing_in(recording.RECORDERS):
        yield OneAtATime


@pytest.fixture
def kernels_on_host(tapes: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels of this package compute steps, in an emulator."""
    import torch

    from tests.unit.kernels.host_kernels import HostCompiler, HostMemory

    reason = HostCompiler.unsupported_reason()
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setitem(kernels.COMPILERS, "cpu", HostCompiler)
    monkeypatch.setitem(card_memory.MEMORIES, "cpu", HostMemory)
    kernels._kernels.pop(torch.device("cpu"), None)  # of tests without this fixture
    yield
    kernels._kernels.pop(torch.device("cpu"), None)


@pytest.fixture(scope="session")
def models(workspace: Any) -> Models:
    return Models(workspace)
