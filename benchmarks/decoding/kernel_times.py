"""The kernels of decoded tokens, as CUPTI records them for torch's profiler: what they take, and how many there are.

CUPTI records what a process runs on the GPU, whatever library launched it, and in replayed graphs, too.
"""

from __future__ import annotations

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
    events = [one for one in record.key_averages() if one.self_device_time_total]
    events.sort(key=lambda one: -one.self_device_time_total)
    return {
        "tokens": tokens,
        "ms_a_token": sum(one.self_device_time_total for one in events) / 1000 / tokens,
        "kernels_a_token": sum(one.count for one in events) / tokens,
        "longest": [
            {"name": one.key[:NAME], "ms": one.self_device_time_total / 1000 / tokens, "count": one.count / tokens}
            for one in events[:LISTED]
        ],
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
