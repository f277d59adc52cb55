"""The kernels of decoded tokens, as CUPTI records them for torch's profiler: what they take, and how many there are.

CUPTI records what a process runs on the GPU, whatever library launched it, and in replayed graphs, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.common import Data

#: So many tokens are recorded, and so many kinds of kernels are kept, by name.
TOKENS = 10
LISTED = 40
NAME = 90


def recorded(decode: Callable[[Callable[[], None]], Any], tokens: int = TOKENS) -> Data:
    """Milliseconds and number of kernels a token; nothing without a GPU.

    ``decode(start)`` decodes, and calls ``start`` when ``tokens`` tokens are left.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        return {}
    record = profile(activities=[ProfilerActivity.CUDA])
    decode(record.start)
    torch.cuda.synchronize()
    record.stop()
    return listed(((one.key, one.self_device_time_total, one.count) for one in record.key_averages()), tokens)


def listed(events: Iterable[tuple[str, float, int]], tokens: int) -> Data:
    """Name, microseconds and count of kernels as :func:`recorded` says them; those that differ in a number at the end
    of their name are of one kind.
    """
    kinds: dict[str, list[float]] = {}
    for name, microseconds, count in events:
        if microseconds:
            found = kinds.setdefault(re.sub(r"_\d+$", "_", name)[:NAME], [0.0, 0.0])
            found[0] += microseconds / 1000 / tokens
            found[1] += count / tokens
    longest = sorted(kinds.items(), key=lambda item: -item[1][0])
    return {
        "tokens": tokens,
        "ms_a_token": sum(ms for ms, _ in kinds.values()),
        "kernels_a_token": sum(count for _, count in kinds.values()),
        "longest": [{"name": name, "ms": ms, "count": count} for name, (ms, count) in longest[:LISTED]],
    }


def spent(profile: Data, kinds: Iterable[tuple[str, str]]) -> dict[str, float]:
    """Milliseconds a token by kind, and of "others". ``kinds``: what kernels do, by a part of their names."""
    found = {kind: 0.0 for kind, _ in kinds} | {"others": profile["ms_a_token"]}
    for kernel in profile["longest"]:
        for kind, part in kinds:
            if part in kernel["name"]:
                found[kind] += kernel["ms"]
                found["others"] -= kernel["ms"]
                break
    return found
