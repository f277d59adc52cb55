"""Launches of compiled kernels, by CUDA's driver.

From compute capability 9.0 on, a kernel that calls ``wait_for_kernel_before()`` may start while the kernel before it
in the stream still runs (programmatic dependent launch). A kernel that never waits would read what the one before has
not written yet, so it starts when that one has ended. So does every kernel outside a captured step: there, what it
reads before it waits may have been written just now.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from typing import Any

from gemma4_compat._kernels import programs
from gemma4_compat._kernels.programs import Kernel

#: Whether kernels may start early; a benchmark turns it off.
EARLY = True
_EARLY_CAPABILITY = (9, 0)
_EARLY_DRIVER = 12030  # CUDA 12.3: the first that captures early launches in a graph
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_SLOT = 8  # bytes of an argument in the buffer
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_UNASKED = 48 << 10  # bytes of shared memory that a block may have in any case


class LaunchAttribute(ctypes.Structure):
    """``CUlaunchAttribute``: the value is a union of 64 bytes."""

    _fields_ = [("id", ctypes.c_int), ("value", ctypes.c_uint64 * 8)]


class LaunchConfig(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    ]


_start_early = ctypes.pointer(LaunchAttribute(_PROGRAMMATIC_STREAM_SERIALIZATION, (ctypes.c_uint64 * 8)(1)))


class Driver:
    """The functions of CUDA's driver that this package calls.

    Args:
        library: ``libcuda``, from ctypes.
    """

    def __init__(self, library: Any) -> None:
        self._library = library

    def version(self) -> int:
        """The newest CUDA that the driver knows: 12030 is CUDA 12.3."""
        found = ctypes.c_int()
        self._check(self._library.cuDriverGetVersion(ctypes.byref(found)), "its version")
        return found.value

    def load(self, binary: bytes) -> Any:
        """A module in the current device's context. It stays loaded as long as the process lives.

        Raises:
            RuntimeError: the driver refuses it.
        """
        module = ctypes.c_void_p()
        self._check(self._library.cuModuleLoadData(ctypes.byref(module), binary), "loading kernels")
        return module

    def function(self, module: Any, name: str) -> Any:
        """A kernel of a module.

        Raises:
            RuntimeError: there is no kernel with this name.
        """
        found = ctypes.c_void_p()
        self._check(self._library.cuModuleGetFunction(ctypes.byref(found), module, name.encode()), name)
        return found

    def launcher(self, function: Any, name: str, device: Any, *, early: bool) -> Launcher:
        """What launches the kernel.

        Args:
            function: of :meth:`function`.
            name: of the kernel, for errors.
            device: ``torch.device`` with an index.
            early: whether it may start before the kernel before it has ended.
        """
        allowed = _UNASKED

        def launch(memory: _Memory) -> None:
            nonlocal allowed
            wanted = memory.values.shared_bytes
            if wanted > allowed:
                set_attribute = self._library.cuFuncSetAttribute
                self._check(set_attribute(function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, wanted), name)
                allowed = wanted
            self._check(self._library.cuLaunchKernelEx(memory.config, function, memory.addresses, None), name)

        return Launcher(launch, device, early=early)

    def call(self, name: str, *arguments: Any) -> None:
        """Call one of its functions with arguments of ctypes.

        Raises:
            RuntimeError: it failed; the message has CUDA's name of the error.
        """
        self._check(getattr(self._library, name)(*arguments), name)

    def _check(self, result: int, what: str) -> None:
        if result:
            name = ctypes.c_char_p()
            self._library.cuGetErrorName(result, ctypes.byref(name))
            error = name.value.decode() if name.value else f"error {result}"
            raise RuntimeError(f"CUDA's driver: {what}: {error}")


def driver() -> Driver:
    """That of this process, which PyTorch has loaded."""
    from torch.cuda import _utils

    return Driver(_utils._get_cuda_library())


def may_start_early(text: str, capability: tuple[int, int], driver: Driver) -> bool:
    """Whether a kernel with this text, on a device of this compute capability, may start early."""
    return programs.waits(text) and capability >= _EARLY_CAPABILITY and driver.version() >= _EARLY_DRIVER


class Launcher:
    """Launches a kernel on the device's current stream, inside a capture as well.

    Args:
        launch: the driver's function.
        device: ``torch.device`` with an index.
        early: whether it may start before the kernel before it has ended.
    """

    def __init__(self, launch: Callable[[_Memory], None], device: Any, *, early: bool) -> None:
        self._launch, self._device, self._early = launch, device, early
        self._lock = threading.Lock()
        self._memory: _Memory | None = None

    def __call__(self, kernel: Kernel) -> None:
        """Launch it.

        Raises:
            RuntimeError: the launch failed; the message has CUDA's name of the error.
            struct.error: a size is not in 32 bits.
        """
        with self._lock:
            if self._memory is None:
                self._memory = _Memory(kernel)
            self._memory.write(kernel)
            self._on_current_stream(self._memory)

    def again(self, kernel: Kernel) -> Callable[[int], None]:
        """A function that launches the same kernel with another address of the last tensor. It keeps no tensor alive,
        and takes a fraction of the time.
        """
        memory, lock = _Memory(kernel), threading.Lock()
        memory.write(kernel)
        last = memory.address_of(len(kernel.tensors) - 1)

        def launch(address: int) -> None:
            with lock:
                last.value = address
                self._on_current_stream(memory)

        return launch

    def _on_current_stream(self, memory: _Memory) -> None:
        import torch

        index = self._device.index
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(self._device):
                return self._on_current_stream(memory)
        values = memory.values
        values.stream = torch._C._cuda_getCurrentRawStream(index)
        if self._early:
            values.attribute_count = EARLY and torch.cuda.is_current_stream_capturing()
        return self._launch(memory)


class _Memory:
    """What the driver reads, and copies, when a kernel is launched: the arguments, each in 8 bytes, their addresses,
    and the configuration.

    Args:
        kernel: any launch of it.
    """

    def __init__(self, kernel: Kernel) -> None:
        sizes = "".join("f4x" if isinstance(size, float) else "I4x" for size in kernel.sizes)
        self._layout = struct.Struct(f"<{len(kernel.tensors)}Q{sizes}")
        self._arguments = ctypes.create_string_buffer(self._layout.size)
        begin = ctypes.addressof(self._arguments)
        addresses = range(begin, begin + self._layout.size, _SLOT)
        self.addresses = (ctypes.c_void_p * len(addresses))(*addresses)
        self.values = LaunchConfig(attributes=_start_early)
        self.config = ctypes.byref(self.values)

    def write(self, kernel: Kernel) -> None:
        """Write a launch's arguments, grid and block.

        Raises:
            struct.error: a size is not in 32 bits.
        """
        self._layout.pack_into(self._arguments, 0, *[tensor.data_ptr() for tensor in kernel.tensors], *kernel.sizes)
        self.values.grid[:] = (*kernel.blocks, 1)
        self.values.block[:] = (kernel.block, 1, 1)
        self.values.shared_bytes = kernel.shared

    def address_of(self, number: int) -> Any:
        """Where the address of a tensor is written."""
        return ctypes.c_uint64.from_buffer(self._arguments, number * _SLOT)
