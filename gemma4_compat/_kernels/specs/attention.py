"""Attention of one query position over a cache, split over the keys: a kernel with custom numerics.

PyTorch's kernels for one query give a head to one block, which walks over all keys that are allocated. Here the keys
from the first to the last one that the mask lets through are divided among blocks. All sums are in ``float``; nothing
between the inputs and the result is rounded to 16 bits. Against attention in float64, mean and largest error are below
those of PyTorch's kernels.

A result has the same bits whatever the length of the cache, the keys before the first valid one, the other sequences
and queries of the call: positions count from the first valid key, and only the number of keys decides how they are
divided.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from gemma4_compat._kernels.programs import Kernel, instance, kinds

#: Query positions of a call; each has the bits that it would have in a call of its own.
MAX_QUERIES = 8
#: Query heads that share a key-value head.
MAX_HEADS = 16
WIDTHS = (16, 32, 64, 128, 256, 512)
_WORD = 16  # bytes of a load
FAR = 1 << 31
#: Splits of one sequence, over all key-value heads, if there are many keys: two blocks for each SM of an H100.
_BLOCKS = 264
#: Keys of a split: at least; at least if that gives each SM a block; at most without tensor cores, which
#: take so many at once.
_FEWEST, _FEWER, _MOST = 32, 64, 128
#: So few keys that they have up to so many numbers are one split: adding up splits takes as long as reading those.
_ALONE = 1 << 15
#: As in ``attention.cuh``: integers that the bounds kernel writes for each query (the first key, how many there are,
#: counters of blocks), the most splits that the last block of a head adds up itself, and the most splits.
_RECORD, _FEW, _MANY = 66, 32, 4096
#: The most key-value heads that have a counter.
_MAX_COUNTERS = _RECORD - 2


@dataclass(frozen=True)
class Call:
    """A call of ``scaled_dot_product_attention`` that the kernels compute.

    Attributes:
        query: (batch, key-value heads, heads, queries, width), a view.
        key: (batch, key-value heads, keys, width).
        value: as ``key``.
        mask: (batch, queries, keys), expanded; bool, or of the query's dtype and added to scores. None: all keys.
        scale: of the scores.
        shape: of the result.
    """

    query: Any
    key: Any
    value: Any
    mask: Any
    scale: float
    shape: tuple[int, ...]


def match(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Call | None:
    """The call of ``scaled_dot_product_attention``; None if the kernels cannot compute it.

    Args:
        query: (batch, heads, queries, width), float32, bfloat16 or float16. Heads that share keys may also be packed:
            (batch, key-value heads, heads that share, width), with a mask that does not tell them apart.
        key: (batch, key-value heads, keys, width).
        value: as ``key``.
        attn_mask: bool or of the query's dtype, as in PyTorch; the same for all heads.
        dropout_p: must be 0.
        is_causal: must be False.
        scale: of the scores; None for ``width ** -0.5``.
        enable_gqa: whether ``query`` may have more heads than ``key``.
    """
    import torch

    tensors = [query, key, value]
    if dropout_p or is_causal or any(tensor.ndim != 4 for tensor in tensors):
        return None
    batch, heads, rows, width = query.shape
    kv_heads, length = key.shape[1], key.shape[2]
    if (
        query.dtype not in (torch.float32, torch.bfloat16, torch.float16)
        or width not in WIDTHS
        or value.shape != key.shape
        or (key.shape[0], key.shape[3]) != (batch, width)
        or not 0 < length < FAR
        or any(tensor.dtype != query.dtype or tensor.device != query.device for tensor in tensors)
        or any(not is_readable(tensor) for tensor in tensors)
        or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
    ):
        return None
    mask = None if attn_mask is None else rows_of(attn_mask, query, length)
    if attn_mask is not None and mask is None:
        return None
    packed = heads == kv_heads and (mask is None or mask.shape[1] == 1)
    if packed:  # rows share keys and mask, as heads do
        query = query[:, :, :, None]
    elif heads == kv_heads or (enable_gqa and heads % kv_heads == 0):
        query = query.unflatten(1, (kv_heads, -1))
    else:
        return None
    queries = query.shape[3]
    if query.shape[2] > MAX_HEADS or queries > MAX_QUERIES or kv_heads > _MAX_COUNTERS:
        return None
    if mask is not None:
        mask = mask.expand(batch, queries, length)
    if _most_splits(length, kv_heads, width, _by_tensor_cores(query.dtype, width)) > _MANY:
        return None
    shape = (batch, heads, rows, width)
    return Call(query, key, value, mask, width**-0.5 if scale is None else float(scale), shape)


def is_readable(tensor: Any) -> bool:
    """Whether its last dimension can be read by 128-bit loads, at offsets that 32 bits can count."""
    import torch

    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.stride(3) == 1
        and not tensor.data_ptr() % _WORD
        and all(stride >= 0 and not stride * tensor.itemsize % _WORD for stride in tensor.stride()[:3])
        and _span(tensor) < FAR
    )


def rows_of(mask: Any, query: Any, length: int) -> Any:
    """The mask as (batch or 1, queries or 1, keys); None if it is not of that kind."""
    import torch

    if mask.dtype not in (torch.bool, query.dtype) or mask.device != query.device or not 1 <= mask.ndim <= 4:
        return None
    mask = mask[(None,) * (4 - mask.ndim)]
    for dim in (1, 2):  # expanded: all the same
        if not mask.stride(dim):
            mask = mask.narrow(dim, 0, 1)
    batch, heads, rows, keys = mask.shape
    if batch not in (1, query.shape[0]) or heads != 1 or rows not in (1, query.shape[2]) or keys != length:
        return None
    return mask[:, 0] if min(mask.stride()) >= 0 and _span(mask) < FAR else None


def _span(tensor: Any) -> int:
    """Elements from the first to the last one in memory."""
    return int(sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)))


def bounds(call: Call) -> tuple[Kernel, Any] | None:
    """The kernel that finds the first valid key of each query, and how many there are up to the last one.

    The result is the same for all calls of a step with the same mask: it may be kept until the mask changes.

    Returns:
        the kernel and what it writes, an argument of :func:`kernels`; None for a call without a mask.
    """
    import torch

    if call.mask is None:
        return None
    batch, queries, length = call.mask.shape
    found = torch.empty((batch, queries, _RECORD), dtype=torch.int32, device=call.mask.device)
    sizes = (queries, length, *call.mask.stride())
    text = _bounds_text(call.mask.dtype)
    threads = min(1024, -(-length // 32) * 32)
    return Kernel(text, (call.mask, found), 1, sizes, block=threads, grid=(batch * queries, 1)), found


def kernels(call: Call, found: Any = None) -> tuple[list[Kernel], Any]:
    """The kernels that compute a call, in order, and its result, not yet written.

    Args:
        call: from :func:`match`.
        found: what the kernel of :func:`bounds` writes, launched before, if the call has a mask. None: it comes first.

    Returns:
        the kernels, and a tensor of ``call.shape``. In memory its queries come before its heads, as in PyTorch's.
    """
    import torch

    query, key, value, mask = call.query, call.key, call.value, call.mask
    batch, kv_heads, heads, queries, width = query.shape
    length = key.shape[2]
    launched: list[Kernel] = []
    if found is None and mask is not None:
        first = bounds(call)
        launched, found = [first[0]], first[1]  # type: ignore[index]
    outer = batch * queries
    rows, splits = outer * kv_heads, _most_splits(length, kv_heads, width, _by_tensor_cores(query.dtype, width))
    new = functools.partial(torch.empty, dtype=torch.float32, device=query.device)
    result = torch.empty((batch, queries, kv_heads * heads, width), dtype=query.dtype, device=query.device)
    parts = new((rows, splits if splits > 1 else 0, heads, width))
    of_splits = new((rows, splits if splits > 1 else 0, heads, 2))
    adds = mask is not None and 1 < splits <= _FEW  # the last block adds up
    layout = _Layout(query.dtype, width, heads, None if mask is None else mask.dtype, adds)
    shared = (kv_heads, queries, splits) if mask is not None else (kv_heads, queries, splits, length)
    reads = [query, key, value] if mask is None else [query, key, value, mask]
    if found is not None and not adds:
        reads.append(found)
    writes = [parts, of_splits, result, *([found] if adds else [])]
    strides = [query.stride(0), query.stride(1), query.stride(2), query.stride(3)]
    strides += [*key.stride()[:3], *value.stride()[:3], *(() if mask is None else mask.stride())]
    grid = (splits if layout.by_tensor_cores else min(splits, max(1, _BLOCKS // kv_heads)), rows)
    sizes = (*shared, *strides, call.scale)
    text, threads = _attention_text(layout)
    launched.append(Kernel(text, (*reads, *writes), len(writes), sizes, block=threads, grid=grid))
    if splits > 1 and not adds:
        reads = [parts, of_splits, *([] if found is None else [found])]
        text, threads = _sum_text(layout)
        grid = (heads * width // (threads // 8), rows)
        launched.append(Kernel(text, (*reads, result), 1, shared, block=threads, grid=grid))
    result = result.transpose(1, 2)
    return launched, result if tuple(result.shape) == call.shape else result.reshape(call.shape)


def _splits(count: int, kv_heads: int, width: int, by_tensor_cores: bool) -> int:
    """How many splits there are for so many keys: as ``Splits`` in ``attention.cuh``."""
    if count <= _alone(width):
        return 1
    per = -(-count * kv_heads // (_BLOCKS * 4)) * 4
    per = max(per, _FEWEST if count * kv_heads <= _BLOCKS // 2 * _FEWEST else _FEWER)
    return -(-count // (per if by_tensor_cores else min(per, _MOST)))


def _alone(width: int) -> int:
    """Up to so many keys are one split."""
    return max(_FEWEST, min(_MOST, _ALONE // width))


def _most_splits(length: int, kv_heads: int, width: int, by_tensor_cores: bool) -> int:
    """So many splits suffice for every number of keys up to ``length``."""
    if length <= _alone(width):
        return 1
    short, long = _BLOCKS // 2 * _FEWEST // kv_heads, _BLOCKS * _FEWER // kv_heads
    found = [-(-min(length, short) // _FEWEST)]
    if length > short:
        found.append(-(-min(length, long) // _FEWER))
    if length > long:
        found.append(-(-_BLOCKS // kv_heads))
    if not by_tensor_cores:
        found.append(-(-length // _MOST))
    return max(found)


@dataclass(frozen=True)
class _Layout:
    """What a kernel's text depends on; ``mask`` is a dtype or None, ``adds`` whether the last block adds up splits."""

    dtype: Any
    width: int
    heads: int
    mask: Any
    adds: bool

    @property
    def by_tensor_cores(self) -> bool:
        """Whether tensor cores compute it."""
        return _by_tensor_cores(self.dtype, self.width)


def _by_tensor_cores(dtype: Any, width: int) -> bool:
    return bool(dtype.itemsize == 2 and width >= 64)


@functools.cache
def _bounds_text(dtype: Any) -> str:
    return instance("attention.cuh", "attention::bounds", kinds()[dtype].name)


@functools.cache
def _attention_text(layout: _Layout) -> tuple[str, int]:
    """The text, and the threads of a block."""
    file, how = ("attention_tensor.cuh", "TensorCores") if layout.by_tensor_cores else ("attention.cuh", "Lanes")
    threads = 512 if layout.heads > 8 and not layout.by_tensor_cores else 256
    kernel = "attend_to_all" if layout.mask is None else "attend_and_add" if layout.adds else "attend"
    arguments = f"{kinds()[layout.dtype].name}, {_mask(layout)}, {layout.width}, {layout.heads}, {threads}"
    return instance(file, f"attention::{kernel}", f"attention::{how}<{arguments}>"), threads


@functools.cache
def _sum_text(layout: _Layout) -> tuple[str, int]:
    """The text, and the threads of a block."""
    threads = 8 * min(layout.width, 32)
    dtypes = (kinds()[layout.dtype].name, *(() if layout.mask is None else (_mask(layout),)))
    kernel = "attention::sum_of_all" if layout.mask is None else "attention::sum"
    arguments = (*dtypes, layout.width, layout.heads, layout.by_tensor_cores, threads)
    return instance("attention.cuh", kernel, *arguments), threads


def _mask(layout: _Layout) -> str:
    return "attention::None" if layout.mask is None else kinds()[layout.mask].name
