"""Microseconds of a call on a GPU: in a captured graph of many, one after the other, in turns with other calls."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.common import Data

CALLS, REPEATS = 50, 8
#: Bytes that do not fit in the cache of a GPU.
CACHE = 200 << 20


def copies(nbytes: int) -> int:
    """How many different inputs of a call, of so many bytes each, keep them out of the cache of a GPU."""
    return min(CALLS, max(2, CACHE // nbytes))


def in_turns(calls: dict[str, Callable[[int], Any]]) -> Data:
    """Microseconds of each call: the median, and all. A call is given its number, below :data:`CALLS`."""
    import torch

    graphs = {name: _graph(call) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(REPEATS):
        for name, (graph, _kept) in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1000 / CALLS)
    return {name: {"median": statistics.median(found), "all": found} for name, found in times.items()}


def _graph(call: Callable[[int], Any]) -> tuple[Any, Any]:
    """A captured graph of many calls, and what they returned."""
    import torch

    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call(number) for number in range(CALLS)]
    return graph, kept
