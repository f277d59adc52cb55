"""Memory of a card that is given back and taken again at the same address, which a CUDA graph may have.

Addresses are reserved once, and memory is mapped to them while it is needed (CUDA Driver API, "Virtual Memory
Management"). PyTorch's allocator does not know of it.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

from gemma4_compat._kernels import launching

_PINNED, _ON_DEVICE, _READ_AND_WRITE = 1, 1, 3


class Properties(ctypes.Structure):
    """``CUmemAllocationProp``."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", ctypes.c_int),
        ("device", ctypes.c_int),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class Access(ctypes.Structure):
    """``CUmemAccessDesc``."""

    _fields_ = [("location", ctypes.c_int), ("device", ctypes.c_int), ("flags", ctypes.c_int)]


class CardMemory:
    """So many bytes, not taken yet.

    Args:
        device: ``torch.device`` with an index.
        size: bytes.

    Raises:
        RuntimeError: the driver cannot do this.
    """

    def __init__(self, device: Any, size: int) -> None:
        self._driver, self._device, self._held = launching.driver(), device, [False]
        self._properties = Properties(_PINNED, 0, _ON_DEVICE, device.index)
        whole, address = ctypes.c_size_t(), ctypes.c_uint64()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(whole), ctypes.byref(self._properties), 0)
        self._size = ctypes.c_size_t(-(-size // whole.value) * whole.value)
        aligned, anywhere, flags = ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0)
        self._call("cuMemAddressReserve", ctypes.byref(address), self._size, aligned, anywhere, flags)
        self._address = address
        weakref.finalize(self, _free, self._driver, device, (address, self._size), self._held).atexit = False

    @property
    def is_there(self) -> bool:
        """Whether it is taken."""
        return self._held[0]

    def take(self) -> bool:
        """Take it, with any contents, if it is not there. False if the card does not have as much."""
        import torch

        if not self.is_there and not self._mapped():
            torch.cuda.empty_cache()  # what PyTorch keeps, and does not use
            return self._mapped()
        return True

    def give_back(self) -> None:
        """Give it back; nothing on the card may still use it."""
        if self.is_there:
            self._call("cuMemUnmap", self._address, self._size)
            self._held[0] = False

    def tensor(self) -> Any:
        """It as a tensor, uint8; call it while it is there. The tensor may live longer."""
        import torch

        with torch.cuda.device(self._device):
            return torch.as_tensor(self, device=self._device)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = self._address.value, False
        return {"shape": (self._size.value,), "typestr": "|u1", "data": data, "version": 3, "strides": None}

    def _mapped(self) -> bool:
        handle, no_flags = ctypes.c_uint64(), ctypes.c_uint64(0)
        try:
            self._call("cuMemCreate", ctypes.byref(handle), self._size, ctypes.byref(self._properties), no_flags)
        except RuntimeError as error:
            if "OUT_OF_MEMORY" in str(error):
                return False
            raise
        try:
            self._call("cuMemMap", self._address, self._size, ctypes.c_size_t(0), handle, no_flags)
            self._held[0] = True
            access = Access(_ON_DEVICE, self._device.index, _READ_AND_WRITE)
            self._call("cuMemSetAccess", self._address, self._size, ctypes.byref(access), ctypes.c_size_t(1))
        finally:
            self._call("cuMemRelease", handle)  # it lives as long as it is mapped
        return True

    def _call(self, name: str, *arguments: Any) -> None:
        _call(self._driver, self._device, name, *arguments)


def _call(driver: launching.Driver, device: Any, name: str, *arguments: Any) -> None:
    import torch

    with torch.cuda.device(device):
        driver.call(name, *arguments)


def _free(driver: launching.Driver, device: Any, place: tuple[Any, Any], held: list[bool]) -> None:
    import torch

    if held[0]:
        torch.cuda.synchronize(device)
        _call(driver, device, "cuMemUnmap", *place)
    _call(driver, device, "cuMemAddressFree", *place)


#: By device type. Tests add one for the CPU.
MEMORIES: dict[str, type[CardMemory]] = {"cuda": CardMemory}
