"""Host memory is unpinned after the devices that read it, never in a capture. A stand-in takes the place of CUDA."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest

from gemma4_compat._offload import host_memory

torch = pytest.importorskip("torch", reason="needs torch")


class Cuda:
    """What ``pin`` and what follows it ask of ``torch.cuda``.

    Attributes:
        calls: in their order: a synchronized device, an address that was pinned or unpinned.
        capturing: the current stream is capturing a graph.
        error: what unpinning returns.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.capturing, self.current, self.error = False, torch.device("cuda", 0), 0

    def synchronize(self, device: Any = None) -> None:
        assert not self.capturing, "operation not permitted when stream is capturing"
        self.calls.append(("synchronize", self.current if device is None else torch.device(device)))

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before, self.current = self.current, torch.device(device)
        yield
        self.current = before

    def cudart(self) -> Cuda:
        return self

    def cudaHostRegister(self, address: int, _size: int, _flags: int) -> int:  # noqa: N802
        self.calls.append(("pin", address))
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        assert not self.capturing, "operation not permitted when stream is capturing"
        self.calls.append((f"unpin from {self.current}", address))
        return self.error

    def forget_error(self) -> None:
        self.calls.append(("error", None))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    gc.collect()  # what other tests left is unpinned before CUDA is another
    stand_in = Cuda()
    for name in ("synchronize", "is_current_stream_capturing", "device", "cudart"):
        monkeypatch.setattr(torch.cuda, name, getattr(stand_in, name))
    monkeypatch.setattr(host_memory, "_forget_error", stand_in.forget_error)
    yield stand_in
    assert not host_memory._deferred


def test_the_device_that_it_was_pinned_for_is_waited_for(cuda: Cuda) -> None:
    table = torch.arange(8)
    memory = host_memory.pin(table, "cuda:1")
    cuda.calls.clear()
    del memory
    gc.collect()
    assert cuda.calls == [
        ("synchronize", torch.device("cuda", 1)),
        ("unpin from cuda:1", table.data_ptr()),
    ]


def test_memory_that_two_devices_read_waits_for_both(cuda: Cuda) -> None:
    table = torch.arange(8)
    first, second = host_memory.pin(table, "cuda:1"), host_memory.pin(table, "cuda:2")
    assert [name for name, _ in cuda.calls] == ["pin"]
    cuda.calls.clear()
    del second, first
    gc.collect()
    assert cuda.calls[:-1] == [("synchronize", torch.device("cuda", 1)), ("synchronize", torch.device("cuda", 2))]
    assert cuda.calls[-1][0].startswith("unpin")


def test_in_a_capture_it_stays_pinned_until_later(cuda: Cuda) -> None:
    table, other = torch.arange(8), torch.arange(9)
    address = table.data_ptr()
    memory = host_memory.pin(table, "cuda:1")
    cuda.calls.clear()
    cuda.capturing = True
    del memory, table
    gc.collect()
    assert cuda.calls == []
    cuda.capturing = False
    memory = host_memory.pin(other, "cuda:0")
    assert cuda.calls == [
        ("synchronize", torch.device("cuda", 1)),
        ("unpin from cuda:1", address),
        ("pin", other.data_ptr()),
    ]
    del memory
    gc.collect()
    assert cuda.calls[-1] == ("unpin from cuda:0", other.data_ptr())


def test_in_a_forked_child_nothing_is_asked_of_cuda(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = host_memory.pin(torch.arange(8), "cuda:0")
    cuda.calls.clear()
    monkeypatch.setattr(host_memory.os, "getpid", lambda: -1)
    del memory
    gc.collect()
    assert cuda.calls == []


def test_an_error_is_not_left_to_the_next_kernel(cuda: Cuda) -> None:
    memory = host_memory.pin(torch.arange(8), "cuda:0")
    cuda.error = 713
    del memory
    gc.collect()
    assert cuda.calls[-1] == ("error", None)
