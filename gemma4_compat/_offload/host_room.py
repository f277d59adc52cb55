"""Before anything is loaded: does host memory have room for what a device map keeps there?"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gemma4_compat._engine.io import notice
from gemma4_compat._engine.io.text import size_text
from gemma4_compat._gemma4.accelerate import device_maps
from gemma4_compat._gemma4.quantization.bytes import expected_bytes

_CGROUP = Path("/sys/fs/cgroup")


def warn_if_short(model: Any, placement: Mapping[str, Any]) -> None:
    """Warn once if a map sends more weights to host memory than fit.

    Not an error: pages of a memory-mapped checkpoint may be dropped again, and other programs may free memory. The
    model is on meta, as its quantizer has prepared it.
    """
    needed, free = host_bytes(model, placement), available()
    if free is not None and needed > free:
        notice.warn_user(
            f"device_map keeps {size_text(needed, up=True)} of weights in host memory, of which {size_text(free)} are "
            "available here, including swap: the system may end the process while it loads. Send some modules to "
            "'disk', or store them in fewer bits (gemma4_compat.quantize(offloaded=True, experts=True))."
        )


def host_bytes(model: Any, placement: Mapping[str, Any]) -> int:
    """Bytes of the weights that a map sends to ``"cpu"``, as they will be stored there."""

    def kept(name: str) -> bool:
        entry = device_maps.entry_for(name, placement)
        return entry is not None and str(placement[entry]) == "cpu"

    tied = getattr(model, "all_tied_weights_keys", None) or {}  # on meta they are not tied yet
    return sum(
        expected_bytes(parameter)
        for name, parameter in model.named_parameters()
        if kept(name) and not (name in tied and kept(tied[name]))
    )


def available() -> int | None:
    """Bytes of host memory that this process may still use, including swap; None if psutil cannot say.

    In a container, at most what its limit leaves: cgroup v2 ``memory.max`` minus the memory in use that cannot be
    dropped, unlike the file cache (Linux, admin-guide/cgroup-v2, "memory.stat").
    """
    import psutil  # accelerate needs it

    try:
        free = int(psutil.virtual_memory().available) + int(psutil.swap_memory().free)
    except (OSError, RuntimeError):
        return None
    with contextlib.suppress(OSError, ValueError):  # another system, no limit ("max"), or an older kind of group
        limit = int((_CGROUP / "memory.max").read_text(encoding="ascii"))
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
        stat = (_CGROUP / "memory.stat").read_text(encoding="ascii").split()
        dropped = int(stat[stat.index("file") + 1]) - int(stat[stat.index("shmem") + 1])
        free = min(free, limit - used + dropped)
    return max(free, 0)
