"""Launches reach CUDA's driver with the right arguments, and early only where a kernel waits."""

from __future__ import annotations

import contextlib
import ctypes
import struct
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from gemma4_compat._kernels import launching
from gemma4_compat._kernels.launching import Driver, LaunchAttribute, LaunchConfig
from gemma4_compat._kernels.programs import Kernel

DEVICE = torch.device("cuda", 1)
WAITS = 'extern "C" __global__ void fused(float* y) { wait_for_kernel_before(); }'


class Library:
    """In place of libcuda: keeps what a launch gets, as the driver reads it."""

    def __init__(self, result: int = 0, version: int = 13000) -> None:
        self.result, self.known = result, version
        self.launches: list[dict[str, Any]] = []

    def cuDriverGetVersion(self, found: Any) -> int:  # noqa: N802 (CUDA's name)
        found._obj.value = self.known
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, addresses: Any, extra: Any) -> int:  # noqa: N802
        config = LaunchConfig.from_buffer_copy(config._obj)
        self.launches.append(
            {
                "grid": tuple(config.grid),
                "block": tuple(config.block),
                "shared": config.shared_bytes,
                "stream": config.stream,
                "attributes": [
                    (config.attributes[number].id, config.attributes[number].value[0])
                    for number in range(config.attribute_count)
                ],
                "function": function.value,
                "arguments": [ctypes.string_at(address, 8) for address in addresses],
                "extra": extra,
                "device": torch.cuda.current_device(),
            }
        )
        return self.result

    def cuGetErrorName(self, result: int, name: Any) -> int:  # noqa: N802
        name._obj.value = {1: b"CUDA_ERROR_INVALID_VALUE"}.get(result)
        return 0 if name._obj.value else 1


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    @contextlib.contextmanager
    def inside(device: Any) -> Any:
        current.append(device.index)
        yield
        current.pop()

    capturing = [True]
    cuda = SimpleNamespace(
        capturing=capturing,
        device=inside,
        current_device=lambda: current[-1],
        is_current_stream_capturing=lambda: capturing[-1],
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 1000 + index, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[-1], raising=False)


def test_structures_are_as_in_cuda_h() -> None:
    """Sizes and offsets that a C++ compiler gives for cuda.h of CUDA 13.5, 64 bits."""
    assert ctypes.sizeof(LaunchConfig) == 56
    offsets = {name: getattr(LaunchConfig, name).offset for name, _ in LaunchConfig._fields_}
    assert offsets == {
        "grid": 0, "block": 12, "shared_bytes": 24, "stream": 32, "attributes": 40, "attribute_count": 48
    }  # fmt: skip
    assert ctypes.sizeof(LaunchAttribute) == 72
    assert (LaunchAttribute.id.offset, LaunchAttribute.value.offset, LaunchAttribute.value.size) == (0, 8, 64)


def launched(library: Library, kernel: Kernel, *, early: bool = False) -> dict[str, Any]:
    Driver(library).launcher(ctypes.c_void_p(7), "fused_0", DEVICE, early=early)(kernel)
    return library.launches[-1]


def test_what_the_driver_gets() -> None:
    tensors = torch.zeros(8), torch.zeros(8)[4:]
    found = launched(Library(), Kernel("", tensors, 1, (300, 0.1, 2**32 - 1)))
    pointers = [struct.pack("<Q", tensor.data_ptr()) for tensor in tensors]
    sizes = [struct.pack("<I4x", 300), struct.pack("<f4x", 0.1), struct.pack("<I4x", 2**32 - 1)]
    assert found == {
        "grid": (3, 1, 1),
        "block": (128, 1, 1),
        "shared": 0,
        "stream": 1001,
        "attributes": [],
        "function": 7,
        "arguments": [*pointers, *sizes],
        "extra": None,
        "device": 1,
    }


def test_a_grid_and_a_block_of_its_own() -> None:
    found = launched(Library(), Kernel("", (), 0, (1,), block=256, grid=(70000, 5)))
    assert (found["grid"], found["block"]) == ((70000, 5, 1), (256, 1, 1))


def test_a_launch_again_has_another_last_tensor_only() -> None:
    library = Library()
    first, last = torch.zeros(8), torch.zeros(8)
    launcher = Driver(library).launcher(ctypes.c_void_p(7), "fused_0", DEVICE, early=False)
    again = launcher.again(Kernel("", (first, last), 1, (300, 5), block=256, grid=(70, 2)))
    launcher(Kernel("", (last, first), 1, (1, 2)))
    again(1234)
    once, found = library.launches
    assert (once["grid"], found["grid"], found["block"]) == ((1, 1, 1), (70, 2, 1), (256, 1, 1))
    arguments = [struct.unpack("<Q", value)[0] for value in found["arguments"]]
    assert arguments == [first.data_ptr(), 1234, 300, 5]
    assert (found["stream"], found["device"]) == (1001, 1)


def test_an_early_launch_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel("", (), 0, (1,))
    assert launched(Library(), kernel, early=True)["attributes"] == [(6, 1)]
    vars(torch.cuda)["capturing"].append(False)  # outside a capture nothing starts early
    assert launched(Library(), kernel, early=True)["attributes"] == []
    vars(torch.cuda)["capturing"].pop()
    monkeypatch.setattr(launching, "EARLY", False)
    assert launched(Library(), kernel, early=True)["attributes"] == []


@pytest.mark.parametrize(
    ("text", "capability", "version", "expected"),
    [
        (WAITS, (9, 0), 12030, True),
        (WAITS, (12, 1), 13000, True),
        (WAITS, (8, 9), 13000, False),
        (WAITS, (9, 0), 12020, False),
        (WAITS.replace("wait_for_kernel_before(); ", ""), (9, 0), 13000, False),
    ],
)
def test_only_kernels_that_wait_start_early(
    text: str, capability: tuple[int, int], version: int, expected: bool
) -> None:
    assert launching.may_start_early(text, capability, Driver(Library(version=version))) is expected


@pytest.mark.parametrize(("result", "name"), [(1, "CUDA_ERROR_INVALID_VALUE"), (12345, "error 12345")])
def test_an_error_has_its_name(result: int, name: str) -> None:
    with pytest.raises(RuntimeError, match=f"^CUDA's driver: fused_0: {name}$"):
        launched(Library(result), Kernel("", (), 0, (1,)))


@pytest.mark.parametrize("size", [-1, 2**32])
def test_a_size_that_does_not_fit_is_refused(size: int) -> None:
    library = Library()
    with pytest.raises(struct.error):
        launched(library, Kernel("", (), 0, (size,), grid=(1, 1)))
    assert library.launches == []
