"""What the machine is, and how fast it copies. Nothing here names its user."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

from gemma4_compat import _shim
from gemma4_compat._doctor import environment
from gemma4_compat._doctor.reproductions import findings
from gemma4_compat._engine.reports import words
from gemma4_compat._engine.reports.words import Verdict
from gemma4_compat._gemma4 import host

#: Bytes of a copy that is timed, and how often. The device copies more, or the start of the copy would count.
_COPIED, _ON_DEVICE, _TIMES = 1 << 28, 1 << 30, 5


def describe() -> dict[str, Any]:
    """Systems, releases, and the first GPU; None without one."""
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "cores": os.cpu_count() or 0,
        "versions": findings.stack(),
        "gpu": _gpu(),
    }


def patches() -> dict[str, list[str]]:
    """The ids of patches that the user has switched off, and of those that could not be applied."""
    off, failed = [], []
    for patch_id, status in _shim.status().items():
        verdict = words.of(status)
        if verdict in (Verdict.OFF, Verdict.REVERTED):
            off.append(patch_id)
        elif verdict is Verdict.FAILED:
            failed.append(patch_id)
    return {"off": off, "failed": failed}


def speeds() -> dict[str, int | None]:
    """Bytes per second of copies: ``pinned`` and ``pageable`` host memory to the GPU, ``device`` and ``host`` memory.

    The last two read and write, and both count. Those of a GPU are None without one.
    """
    import torch

    source = torch.ones(_COPIED, dtype=torch.uint8)
    there = torch.empty_like(source)
    found: dict[str, int | None] = dict.fromkeys(("pinned", "pageable", "device"))
    found["host"] = _rate(lambda: there.copy_(source), 2 * _COPIED)
    if torch.cuda.is_available():
        target = torch.empty(_COPIED, dtype=torch.uint8, device=0)
        found["pageable"] = _rate(lambda: target.copy_(source), _COPIED)
        pinned = source.pin_memory()
        found["pinned"] = _rate(lambda: target.copy_(pinned, non_blocking=True), _COPIED)
        size = min(_ON_DEVICE, torch.cuda.mem_get_info()[0] // 4)
        one = torch.ones(size, dtype=torch.uint8, device=0)
        other = torch.empty_like(one)
        found["device"] = _rate(lambda: other.copy_(one), 2 * size)
        del target, one, other
        torch.cuda.empty_cache()
    return found


def _gpu() -> dict[str, Any] | None:
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info(0)
    properties, capability = torch.cuda.get_device_properties(0), host.capability(torch.device("cuda", 0))
    clock = getattr(properties, "clock_rate", None)  # kHz; some releases of PyTorch do not have it
    return {
        "name": properties.name,
        "memory": total,
        "free": free,
        "multiprocessors": properties.multi_processor_count,
        "ghz": None if not clock else round(clock / 1e6, 3),
        "capability": None if capability is None else "{}.{}".format(*capability),
        "driver": environment._driver(),
        "cuda": torch.version.cuda,
    }


def _rate(action: Callable[[], Any], nbytes: int) -> int:
    """Bytes per second: the median of some runs after one."""
    seconds = []
    for _ in range(_TIMES + 1):
        synchronize()
        started = time.perf_counter()
        action()
        synchronize()
        seconds.append(time.perf_counter() - started)
    return round(nbytes / max(statistics.median(seconds[1:]), 1e-9))


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
