"""Read-ahead: announces which rows of a memory-mapped file are copied next, so that the disk reads them all at once.

A copy from a mapped file waits at each page that is not in memory, and the system reads ahead only behind that page,
so rows that are apart are read one after another. ``madvise(MADV_WILLNEED)`` (madvise(2) of Linux and macOS) starts to
read a range and returns. It is advice: if a system lacks it or refuses it, the copy waits as before. Values never
change. A whole layer is read in order, and the system reads ahead well enough for that.

Advice about pages in memory takes a third as long as copying them. So a row is not announced if its first and last
pages are in memory (``mincore``, which reports that for every page of a file that the process may not write to).
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Iterable
from typing import Any

#: Bytes of one advice. Linux cuts a longer range to what the disk takes in one request, or to its own read-ahead
#: (128 KiB by default) if that is larger (mm/readahead.c, force_page_cache_ra).
STEP = 128 << 10


@functools.cache
def _advise() -> Any:
    """The C library's ``madvise``; None if the system has none."""
    return _function("madvise", ctypes.c_int) if hasattr(mmap, "MADV_WILLNEED") else None


@functools.cache
def _residency() -> Any:
    """The C library's ``mincore``; None if the system has none."""
    return _function("mincore", ctypes.c_void_p)


def _function(name: str, last: Any) -> Any:
    """A function of the C library that takes an address, a length and ``last``; None if it does not exist."""
    found = getattr(ctypes.CDLL(None), name, None)
    if found is not None:
        found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_size_t, last), ctypes.c_int
    return found


def _is_in_memory(start: int, end: int) -> bool:
    """Whether the first and the last page of a range are in memory; ``start`` is the start of a page."""
    ask, held = _residency(), (ctypes.c_ubyte * 1)()
    return ask is not None and all(
        ask(page, 1, held) == 0 and held[0] & 1 for page in (start, end - 1 - (end - 1) % mmap.PAGESIZE)
    )


def rows(tensor: Any, numbers: Iterable[int]) -> None:
    """Announce rows of a tensor that are copied next.

    Args:
        tensor: (rows, ...), contiguous, mapped from a file.
        numbers: row numbers; repeated ones are read once.
    """
    advise = _advise()
    if advise is None or not tensor.numel():
        return
    first, size = tensor.data_ptr(), tensor[0].numel() * tensor.element_size()
    for number in numbers:
        start, end = first + number * size, first + (number + 1) * size
        start -= start % mmap.PAGESIZE
        if _is_in_memory(start, end):
            continue
        while start < end:
            advise(start, min(STEP, end - start), mmap.MADV_WILLNEED)  # if refused, the copy reads it by itself
            start += STEP
