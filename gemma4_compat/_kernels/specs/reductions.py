"""Means over the last dimension, in the order in which PyTorch's CUDA kernel adds.

The norms of a step each need the mean of a row. PyTorch computes it with one kernel, between two pointwise ones; in a
row kernel (:mod:`kernel_source`), one block does all three. The sum has PyTorch's bits if it is added in the same
order: ``ATen/native/cuda/Reduce.cuh`` (here: torch 2.13's) says how many threads share a row, which of them adds which
elements to which of its four sums, and how the sums are added. Each shape is tried on the GPU before its first use.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

#: The name of the operation.
MEAN = "mean"
_MOST_THREADS = 512  # max_reduce_threads
WARP = 32
_SUMS = 4  # of a thread: vt0, and input_vec_size


class Order(NamedTuple):
    """Which thread adds what.

    Attributes:
        threads: that share a row.
        vector: whether a thread reads four neighbours at once, one for each of its sums; otherwise every fourth of its
            elements belongs to the same sum.
    """

    threads: int
    vector: bool


@functools.cache
def order(rows: int, columns: int) -> Order | None:
    """The order for ``rows`` contiguous rows of float32 numbers; None if PyTorch divides a row among warps or blocks.

    Follows ``setReduceConfig`` and ``ReduceConfig::set_block_dimension``.
    """
    vector = columns >= 128
    if columns < WARP or (vector and columns % _SUMS):
        return None
    wide = columns // _SUMS if vector else columns
    width, height = min(_power(wide), WARP), min(_power(rows), _MOST_THREADS)
    height = min(height, _MOST_THREADS // width)
    width = min(_power(wide), _MOST_THREADS // height)
    if -(-columns // width) >= min(height * 16, 256):
        return None
    return Order(width, vector)


def _power(number: int) -> int:
    """The largest power of two that is not larger, at most the number of threads."""
    return min(1 << (number.bit_length() - 1), _MOST_THREADS)


def turns(columns: int, found: Order) -> int:
    """How often each thread reads."""
    each = columns // _SUMS if found.vector else columns
    return -(-each // found.threads)


def total(columns: int, found: Order, name: str) -> list[str]:
    """C that adds the four sums of each thread, ``part0`` to ``part3``, and gives every thread the mean, ``m``.

    Args:
        columns: of a row.
        found: its order.
        name: of the shared memory; each reduction of a kernel has its own.
    """
    threads = found.threads
    lines = [
        "float whole = __fadd_rn(__fadd_rn(__fadd_rn(part0, part1), part2), part3);",
    ]
    if threads > WARP:
        # Halves are added to halves until a warp is left; each warp does that for itself, without a further barrier.
        lines.append(f"__shared__ float shared{name}[{threads}];")
        lines.append(f"if (threadIdx.x < {threads}u) shared{name}[threadIdx.x] = whole;")
        lines.append("__syncthreads();")
        lines.append(f"whole = {_halves(f'shared{name}', threads)};")
    lines += [
        f"whole = __fadd_rn(whole, __shfl_down_sync(0xffffffffu, whole, {offset}));" for offset in (16, 8, 4, 2, 1)
    ]
    lines.append("whole = __shfl_sync(0xffffffffu, whole, 0);")
    lines.append(f"m = __fmul_rn(whole, __fdiv_rn(1.0f, {columns}.0f));")
    return lines


def _halves(memory: str, threads: int, begin: int = 0, offset: int = WARP) -> str:
    """The sum that the thread ``begin`` of a warp has, when halves down to this offset have been added."""
    if offset == threads:
        return f"{memory}[{begin} + (threadIdx.x & 31u)]"
    one, other = (_halves(memory, threads, at, 2 * offset) for at in (begin, begin + offset))
    return f"__fadd_rn({one}, {other})"
