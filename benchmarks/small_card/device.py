"""The GPU (or the CPU in its place): what it is, how much memory is taken, how long something takes."""

from __future__ import annotations

import contextlib
import gc
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

from gemma4_compat._doctor.reproductions import findings

GIB = 2**30
#: A generate, or a forward, that takes longer than this is timed once.
SLOW_S = 6.0


def main_device() -> Any:
    import torch

    return 0 if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def memory() -> dict[str, float | None]:
    """What is allocated now and was at most since the last :func:`forget_peak`; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return dict.fromkeys(("resident_gib", "peak_gib", "peak_reserved_gib"))
    synchronize()
    return {
        "resident_gib": torch.cuda.memory_allocated() / GIB,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "peak_reserved_gib": torch.cuda.max_memory_reserved() / GIB,
    }


def forget_peak() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@contextlib.contextmanager
def ballast(budget: float | None) -> Iterator[float]:
    """Inside, a tensor leaves ``budget`` GiB of the card to this process's tensors; gives its size in GiB."""
    import torch

    if budget is None or main_device() == "cpu":
        yield 0.0
        return
    room = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    size = max(0, min(int(room - budget * GIB), torch.cuda.mem_get_info()[0] - 2**26))
    tensor = torch.empty(size, dtype=torch.uint8, device=0)
    try:
        yield size / GIB
    finally:
        del tensor
        forget_peak()


def machine() -> dict[str, Any]:
    import torch

    device, driver = "CPU", None
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        said = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
        device, driver = torch.cuda.get_device_name(0), said[0] if said else "unknown"
    return {
        "device": device,
        "driver": driver,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": findings.stack(),
    }


def bandwidth() -> dict[str, float] | None:
    """GiB/s of a 256 MiB copy to the GPU, from pinned and from pageable memory: the median of five."""
    import torch

    if not torch.cuda.is_available():
        return None
    target = torch.empty(GIB // 4, dtype=torch.uint8, device=0)
    found = {}
    for kind in ("pinned", "pageable"):
        source = torch.ones(GIB // 4, dtype=torch.uint8, pin_memory=kind == "pinned")
        found[kind] = 0.25 / timed(lambda source=source: target.copy_(source, non_blocking=True), runs=5)[0]
    return found


def timed(action: Callable[[], Any], *, runs: int) -> tuple[float, int]:
    """Seconds of ``action`` after a warm-up, the median, and of how many; a slow one is not repeated."""
    seconds = []
    for _ in range(runs + 1):
        synchronize()
        started = time.perf_counter()
        action()
        synchronize()
        seconds.append(time.perf_counter() - started)
        if seconds[0] > SLOW_S:
            return seconds[0], 1
    return statistics.median(seconds[1:]), runs
