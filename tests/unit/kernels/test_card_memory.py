"""Memory of a card that goes and comes back at its address, against a driver that keeps account."""

from __future__ import annotations

import contextlib
import gc
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from gemma4_compat._kernels import card_memory, launching
from gemma4_compat._kernels.card_memory import Access, CardMemory, Properties

DEVICE = torch.device("cuda", 1)
PAGE, ADDRESS, HANDLE = 1 << 21, (1 << 40) + (1 << 21), (1 << 33) + 5
OUT_OF_MEMORY, REFUSED = 2, 801


class Library:
    """In place of libcuda."""

    def __init__(self) -> None:
        self.free, self.reserved, self.mapped, self.handles = 4 * PAGE, 0, 0, 0
        self.refuses, self.calls = "", list[str]()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            return (
                REFUSED if name == self.refuses else int(getattr(self, name.removeprefix("cuMem").lower())(*arguments))
            )

        return call

    def getallocationgranularity(self, found: Any, properties: Any, minimum: int) -> int:
        self.check(properties)
        found._obj.value = PAGE
        return minimum

    def check(self, properties: Any) -> None:
        """CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, and the device; nothing else."""
        given = bytes(properties._obj)
        assert len(given) == 32
        assert given == b"".join(number.to_bytes(4, "little") for number in (1, 0, 1, 1, 0, 0, 0, 0))

    def addressreserve(self, found: Any, size: Any, aligned: Any, anywhere: Any, flags: Any) -> int:
        found._obj.value, self.reserved = ADDRESS, size.value
        return int(aligned.value + anywhere.value + flags.value)

    def create(self, found: Any, size: Any, properties: Any, flags: Any) -> int:
        self.check(properties)
        if size.value > self.free:
            return OUT_OF_MEMORY
        found._obj.value = HANDLE
        self.free -= size.value
        self.handles += 1
        return int(flags.value)

    def map(self, address: Any, size: Any, offset: Any, handle: Any, flags: Any) -> int:
        assert (address.value, handle.value, self.mapped) == (ADDRESS, HANDLE, 0)
        self.mapped = size.value
        return int(offset.value + flags.value)

    def setaccess(self, address: Any, size: Any, access: Any, count: Any) -> int:
        assert (address.value, size.value, count.value) == (ADDRESS, self.mapped, 1)
        assert bytes(access._obj) == bytes(Access(1, 1, 3))
        return 0

    def release(self, handle: Any) -> int:
        assert handle.value == HANDLE
        self.handles -= 1
        return 0

    def unmap(self, address: Any, size: Any) -> int:
        assert (address.value, size.value) == (ADDRESS, self.mapped)
        self.free += self.mapped
        self.mapped = 0
        return 0

    def addressfree(self, address: Any, size: Any) -> int:
        assert (address.value, size.value, self.mapped) == (ADDRESS, self.reserved, 0)
        self.reserved = 0
        return 0

    def cuGetErrorName(self, result: int, name: Any) -> int:  # noqa: N802 (CUDA's name)
        name._obj.value = {2: b"CUDA_ERROR_OUT_OF_MEMORY", 801: b"CUDA_ERROR_NOT_SUPPORTED"}[result]
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()
    monkeypatch.setattr(launching, "driver", lambda: launching.Driver(found))

    def empty_cache() -> None:
        found.calls.append("empty_cache")

    cuda = SimpleNamespace(
        device=lambda _: contextlib.nullcontext(),
        empty_cache=empty_cache,
        synchronize=lambda _: found.calls.append("synchronize"),
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    return found


def test_it_comes_back_at_its_address(library: Library) -> None:
    memory = CardMemory(DEVICE, 2 * PAGE + 1)
    assert (library.reserved, library.free, memory.is_there) == (3 * PAGE, 4 * PAGE, False)
    for _ in range(3):
        assert memory.take()
        assert memory.take()
        assert (library.free, library.mapped, library.handles, memory.is_there) == (PAGE, 3 * PAGE, 0, True)
        interface = memory.__cuda_array_interface__
        assert (interface["data"], interface["shape"], interface["typestr"]) == ((ADDRESS, False), (3 * PAGE,), "|u1")
        memory.give_back()
        memory.give_back()
        assert (library.free, library.mapped, memory.is_there) == (4 * PAGE, 0, False)
    assert "empty_cache" not in library.calls


def test_there_is_not_as_much(library: Library) -> None:
    memory = CardMemory(DEVICE, 4 * PAGE)
    library.free = 3 * PAGE
    assert not memory.take()
    assert library.calls[-3:] == ["cuMemCreate", "empty_cache", "cuMemCreate"]
    assert not memory.is_there
    library.free = 4 * PAGE
    assert memory.take()


@pytest.mark.parametrize("taken", [False, True])
def test_whoever_forgets_it_gives_it_back(library: Library, *, taken: bool) -> None:
    memory = CardMemory(DEVICE, PAGE)
    assert memory.take()
    if not taken:
        memory.give_back()
    del memory
    gc.collect()
    assert (library.free, library.reserved, library.mapped) == (4 * PAGE, 0, 0)
    assert ("synchronize" in library.calls) == taken


@pytest.mark.parametrize("name", ["cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_a_driver_that_refuses(library: Library, name: str) -> None:
    library.refuses = name
    with pytest.raises(RuntimeError, match=f"{name}: CUDA_ERROR_NOT_SUPPORTED"):
        CardMemory(DEVICE, PAGE).take()
    gc.collect()
    assert (library.reserved, library.mapped, library.handles) == (0, 0, 0)


def test_the_structures_are_cudas() -> None:
    assert card_memory.MEMORIES["cuda"] is CardMemory
    places = [getattr(Properties, name).offset for name in ("type", "handles", "location", "device", "metadata")]
    assert places == [0, 4, 8, 12, 16]
