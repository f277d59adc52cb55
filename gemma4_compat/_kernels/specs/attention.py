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

from gemma4_compat._kernels.programs import FAR, Kernel, instance, kinds, span

#: Query positions of a call; each has the bits that it would have in a call of its own.
MAX_QUERIES = 8
#: Query heads that share a key-value head.
MAX_HEADS = 16
WIDTHS = (16, 32, 64, 128, 256, 512)
_WORD = 16  # bytes of a load
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

    dtypes = torch.float32, torch.bfloat16, torch.float16
    if dropout_p or is_causal or not are_readable(query, key, value, dtypes):
        return None
    batch, heads, rows, width = query.shape
    kv_heads, length = key.shape[1], key.shape[2]
    if width not in WIDTHS or not 0 < length < FAR:
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


def are_readable(query: Any, key: Any, value: Any, dtypes: tuple[Any, ...]) -> bool:
    """Whether kernels can read what attention is called with: all of one of these dtypes, without gradients."""
    import torch

    tensors = query, key, value
    return (
        all(tensor.ndim == 4 for tensor in tensors)
        and query.dtype in dtypes
        and value.shape == key.shape
        and (key.shape[0], key.shape[3]) == (query.shape[0], query.shape[3])
        and all(tensor.dtype == query.dtype and tensor.device == query.device for tensor in tensors)
        and all(_is_readable(tensor) for tensor in tensors)
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
    )


def _is_readable(tensor: Any) -> bool:
    """Whether its last dimension can be read by 128-bit loads, at offsets that 32 bits can count."""
    import torch

    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.stride(3) == 1
        and not tensor.data_ptr() % _WORD
        and all(stride >= 0 and not stride * tensor.itemsize % _WORD for stride in tensor.stride()[:3])
        and span(tensor) < FAR
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
    return mask[:, 0] if min(mask.stride()) >= 0 and span(mask) < FAR else None


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
    text = instance("attention.cuh", "attention::bounds", kinds()[call.mask.dtype].name)
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
    by_tensor_cores = _by_tensor_cores(query.dtype, width)
    rows, splits = batch * queries * kv_heads, _most_splits(length, kv_heads, width, by_tensor_cores)
    new = functools.partial(torch.empty, dtype=torch.float32, device=query.device)
    result = torch.empty((batch, queries, kv_heads * heads, width), dtype=query.dtype, device=query.device)
    parts = new((rows, splits if splits > 1 else 0, heads, width))
    of_splits = new((rows, splits if splits > 1 else 0, heads, 2))
    adds = mask is not None and 1 < splits <= _FEW  # the last block adds up
    given, valid = (key, result) if mask is None else (mask, found)  # in place of what is not read
    strides = [*query.stride()[:4], *key.stride()[:3], *value.stride()[:3]]
    strides += (0, 0, 0) if mask is None else mask.stride()
    (text, threads), (text_of_sum, threads_of_sum) = _texts(
        query.dtype, None if mask is None else mask.dtype, width, heads, adds
    )
    tensors = query, key, value, given, parts, of_splits, result, valid  # of which those that add write the last
    sizes = (kv_heads, queries, splits, length, *strides, call.scale)
    grid = (splits if by_tensor_cores else min(splits, max(1, _BLOCKS // kv_heads)), rows)
    launched.append(Kernel(text, tensors, 4, sizes, block=threads, grid=grid))
    if splits > 1 and not adds:
        sums, grid = (parts, of_splits, valid, result), (heads * width // (threads_of_sum // 8), rows)
        launched.append(Kernel(text_of_sum, sums, 1, (kv_heads, splits, length), block=threads_of_sum, grid=grid))
    result = result.transpose(1, 2)
    return launched, result if tuple(result.shape) == call.shape else result.reshape(call.shape)


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


def _by_tensor_cores(dtype: Any, width: int) -> bool:
    return bool(dtype.itemsize == 2 and width >= 64)


@functools.cache
def _texts(dtype: Any, mask: Any, width: int, heads: int, adds: bool) -> tuple[tuple[str, int], tuple[str, int]]:
    """The kernel that attends, and the one that adds up splits: each one's text, and the threads of a block.

    Args:
        dtype: of the query.
        mask: its dtype; None without.
        width: of a head.
        heads: that share a key-value head.
        adds: whether the last block adds up splits.
    """
    known, by_tensor_cores = kinds(), _by_tensor_cores(dtype, width)
    common = known[dtype].name, "attention::None" if mask is None else known[mask].name, width, heads
    threads, of_sum = 512 if heads > 8 and not by_tensor_cores else 256, 8 * min(width, 32)
    file, name = ("attention_tensor.cuh", "attend_by_tensor_cores") if by_tensor_cores else ("attention.cuh", "attend")
    attend = instance(file, f"attention::{name}", *common, threads, adds)
    return (attend, threads), (instance("attention.cuh", "attention::sum", *common, by_tensor_cores, of_sum), of_sum)
