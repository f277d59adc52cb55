"""Files that tensors are mapped from: dropped from memory, and read as fast as the disk gives them. Needs Linux."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from pathlib import Path
from typing import Any

#: Linux, madvise(2): reclaim these pages; those of a file that nobody wrote to are dropped.
MADV_PAGEOUT = 21
#: Bytes that :func:`read_gib_s` reads at most.
READ = 4 << 30


def _range(tensor: Any) -> tuple[int, int]:
    """Address and length of the whole pages that hold the tensor."""
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    end = tensor.data_ptr() + tensor.numel() * tensor.element_size()
    return start, -(-(end - start) // mmap.PAGESIZE) * mmap.PAGESIZE


def _files(tensors: list[Any]) -> list[Path]:
    """The files that ``tensors`` are mapped from."""
    starts = {_range(tensor)[0] for tensor in tensors}
    found = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        span, *rest = line.split(maxsplit=5)
        low, high = (int(end, 16) for end in span.split("-"))
        if any(low <= start < high for start in starts):
            found.append(Path(rest[-1]))
    return list(dict.fromkeys(found))


def dropped(tensors: list[Any]) -> float:
    """Drop the files of ``tensors`` from memory; the share of the tensors' pages that is there nevertheless.

    Raises:
        OSError: the system does not know MADV_PAGEOUT, or a tensor is not mapped.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    os.sync()  # a page that was written to stays until the disk has it
    there = pages = 0
    for start, length in map(_range, tensors):  # pages that this process has touched,
        if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), MADV_PAGEOUT):
            raise OSError(ctypes.get_errno(), "madvise(MADV_PAGEOUT)")
    for path in _files(tensors):  # and those that it has not
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    for start, length in map(_range, tensors):
        held = (ctypes.c_ubyte * (length // mmap.PAGESIZE))()
        if libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(length), held):
            raise OSError(ctypes.get_errno(), "mincore")
        there += sum(one & 1 for one in held)
        pages += len(held)
    return there / pages


def read_gib_s(tensors: list[Any]) -> float:
    """GiB/s of reading, one after another, the files that ``tensors`` are mapped from, :data:`READ` bytes at most."""
    size, started = 0, time.perf_counter()
    for path in _files(tensors):
        with path.open("rb", buffering=0) as file:
            while size < READ and (read := file.read(4 << 20)):
                size += len(read)
    return size / (time.perf_counter() - started) / (1 << 30)
