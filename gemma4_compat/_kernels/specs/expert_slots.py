"""Slots: rows of the experts that a layer in host memory has used last, on the card.

``cuda/expert_slots.cuh`` decides on the card which slot each expert of a step has, and copies those that had none from
pinned memory. Nothing synchronizes, and a CUDA graph can capture it. Rows are copied as bytes, so a step has the same
bits whatever is in the slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gemma4_compat._kernels.programs import BLOCK, Kernel, instance

#: Experts of a layer at most.
MOST = 1024
_FILE = "expert_slots.cuh"
_BLOCKS, _THREADS = 64, BLOCK  # that copy an expert: enough loads on their way to keep a bus busy


def state_size(experts: int, slots: int) -> int:
    """Numbers of a layer's state, int32: its last step, the slot of each expert, and of each slot its expert and when
    it was used last. All are -1 in an empty one.
    """
    return 1 + experts + 2 * slots


def kernels(
    chosen: Any, memory: Any, layout: Any, slots: Any, state: Any, counts: Any, sizes: tuple[int, ...]
) -> tuple[Sequence[Kernel], Any]:
    """The kernels that have the chosen experts in slots, and the slot of each, int64 (n,), not yet written.

    Args:
        chosen: int64 (n,), contiguous; it may have equal ones. At most as many as there are slots.
        memory: uint8, what the host has of the layer; addressed from the card.
        layout: int64 (tensors, 3): where each begins in ``memory`` and in ``slots``, and the bytes of a row.
        slots: uint8, on the card.
        state: int32 (:func:`state_size`).
        counts: int64 (2): hits and misses so far.
        sizes: experts and slots.
    """
    import torch

    into = torch.empty_like(chosen)
    missing = torch.empty(len(chosen), dtype=torch.int32, device=chosen.device)
    deciding = Kernel(
        instance(_FILE, "expert_slots::chosen", MOST),
        (chosen, state, counts, into, missing),
        *(4, (len(chosen), *sizes), BLOCK, (1, 1)),
    )
    copying = Kernel(
        instance(_FILE, "expert_slots::filled", _THREADS),
        (memory, layout, chosen, into, missing, slots),
        *(1, (len(layout),), _THREADS, (_BLOCKS, len(chosen))),
    )
    return (deciding, copying), into
