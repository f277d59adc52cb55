"""Attention of one query position over a cache, split over the keys: kernels with an arithmetic of their own.

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

from gemma4_compat._kernels.programs import Kernel, kinds
from gemma4_compat._kernels.specs import attention_source as source
from gemma4_compat._kernels.specs import attention_tensor_source as matrices

#: Query positions of a call; each has the bits that it would have in a call of its own.
MAX_QUERIES = 8
#: Query heads that share a key-value head.
MAX_HEADS = 16
WIDTHS = (16, 32, 64, 128, 256, 512)
_WORD = 16  # bytes of a load
FAR = 1 << 31
#: Splits of one sequence, over all key-value heads, if there are many keys: two blocks for each SM of an H100.
_BLOCKS = 264
#: Keys of a split: at least; at least if that gives each SM a block; at most without matrix units, which
#: take so many at once.
_FEWEST, _FEWER, _MOST = 32, 64, 128
#: So few keys that they have up to so many numbers are one split: adding up splits takes as long as reading those.
_ALONE = 1 << 15


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


def understood(
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
    if query.shape[2] > MAX_HEADS or queries > MAX_QUERIES or kv_heads > source.MAX_COUNTERS:
        return None
    if mask is not None:
        mask = mask.expand(batch, queries, length)
    if _most_splits(length, kv_heads, width, _by_matrix(query.dtype, width)) > source.MANY:
        return None
    shape = (batch, heads, rows, width)
    return Call(query, key, value, mask, width**-0.5 if scale is None else float(scale), shape)


def is_readable(tensor: Any) -> bool:
    """Whether its last dimension can be read in words of 16 bytes, at offsets that 32 bits can count."""
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
    found = torch.empty((batch, queries, source.RECORD), dtype=torch.int32, device=call.mask.device)
    sizes = (queries, length, *call.mask.stride())
    text = _bounds_text(call.mask.dtype)
    threads = min(1024, -(-length // 32) * 32)
    return Kernel(text, (call.mask, found), 1, sizes, block=threads, grid=(batch * queries, 1)), found


def kernels(call: Call, found: Any = None) -> tuple[list[Kernel], Any]:
    """The kernels that compute a call, in order, and its result, not yet written.

    Args:
        call: from :func:`understood`.
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
    rows, splits = outer * kv_heads, _most_splits(length, kv_heads, width, _by_matrix(query.dtype, width))
    new = functools.partial(torch.empty, dtype=torch.float32, device=query.device)
    result = torch.empty((batch, queries, kv_heads * heads, width), dtype=query.dtype, device=query.device)
    parts = new((rows, splits if splits > 1 else 0, heads, width))
    of_splits = new((rows, splits if splits > 1 else 0, heads, 2))
    adds = mask is not None and 1 < splits <= source.FEW  # the last block adds up
    layout = _Layout(query.dtype, width, heads, None if mask is None else mask.dtype, adds)
    shared = (kv_heads, queries, splits) if mask is not None else (kv_heads, queries, splits, length)
    reads = [query, key, value] if mask is None else [query, key, value, mask]
    if found is not None and not adds:
        reads.append(found)
    writes = [parts, of_splits, result, *([found] if adds else [])]
    strides = [query.stride(0), query.stride(1), query.stride(2), query.stride(3)]
    strides += [*key.stride()[:3], *value.stride()[:3], *(() if mask is None else mask.stride())]
    grid = (splits if layout.by_matrix else min(splits, max(1, _BLOCKS // kv_heads)), rows)
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


def _splits(count: int, kv_heads: int, width: int, by_matrix: bool) -> int:
    """How many splits there are for so many keys: as in ``_SPLITS``."""
    if count <= _alone(width):
        return 1
    per = -(-count * kv_heads // (_BLOCKS * 4)) * 4
    per = max(per, _FEWEST if count * kv_heads <= _BLOCKS // 2 * _FEWEST else _FEWER)
    return -(-count // (per if by_matrix else min(per, _MOST)))


def _alone(width: int) -> int:
    """Up to so many keys are one split."""
    return max(_FEWEST, min(_MOST, _ALONE // width))


def _most_splits(length: int, kv_heads: int, width: int, by_matrix: bool) -> int:
    """So many splits suffice for every number of keys up to ``length``."""
    if length <= _alone(width):
        return 1
    short, long = _BLOCKS // 2 * _FEWEST // kv_heads, _BLOCKS * _FEWER // kv_heads
    found = [-(-min(length, short) // _FEWEST)]
    if length > short:
        found.append(-(-min(length, long) // _FEWER))
    if length > long:
        found.append(-(-_BLOCKS // kv_heads))
    if not by_matrix:
        found.append(-(-length // _MOST))
    return max(found)


_SPLITS = """const int wanted = (int)((count * kv_heads + {span}u) / {spanned}u) * 4;
  const int fewest = count * kv_heads <= {few}u ? {fewest} : {fewer};
  const int per = count <= {alone}u ? {alone} : min(max(wanted, fewest), {most});
  const int splits = max((int)((count + per - 1u) / per), 1);"""


@dataclass(frozen=True)
class _Layout:
    """What a kernel's text depends on; ``mask`` is a dtype or None, ``adds`` whether the last block adds up splits."""

    dtype: Any
    width: int
    heads: int
    mask: Any
    adds: bool

    @property
    def by_matrix(self) -> bool:
        """Whether there are matrix units for it."""
        return _by_matrix(self.dtype, self.width)


def _by_matrix(dtype: Any, width: int) -> bool:
    return bool(dtype.itemsize == 2 and width >= 64)


def _filled(text: str, known: dict[str, str]) -> str:
    for name, value in known.items():
        text = text.replace(f"@{name}@", value)
    return text


def _constants(dtype: Any, **values: int) -> str:
    """The first lines of a kernel."""
    kind = kinds()[dtype]
    numbers = ", ".join(f"{name} = {value}" for name, value in values.items())
    stored = kind.store.format(kind.rounded.format("x"))
    return f"  constexpr int {numbers};\n  auto stored = [](float x) {{ return {stored}; }};"


@functools.cache
def _bounds_text(dtype: Any) -> str:
    import torch

    kind = kinds()[dtype]
    known = {"MASK": kind.c, "CONSTANTS": f"  constexpr unsigned int RECORD = {source.RECORD}u;"}
    if dtype == torch.bool:
        known |= {"VALID": "bits != 0", "SOME": "0u", "FROM_WORD": "(unsigned char)bits"}
    else:
        number = kind.load.format("bits")
        known["VALID"] = f"{number} > {torch.finfo(dtype).min / 2!r}f"
        known["SOME"] = f"({number} > __uint_as_float(0xff800000u) ? 1u : 0u)"
        known["FROM_WORD"] = "__uint_as_float(bits)" if dtype == torch.float32 else "(u16)bits"
    return _filled(source.BOUNDS, known)


def _shared(layout: _Layout) -> dict[str, str]:
    """What the two kernels of a layout have in common."""
    kind = kinds()[layout.dtype]
    wide = layout.dtype.itemsize == 4
    part = "(u16)(word.part[e / 2] >> (e % 2 * 16))"
    at = f"outer * {source.RECORD}u"
    return {
        "T": kind.c,
        "ELEMENT": "__uint_as_float(word.part[e])" if wide else kind.load.format(part),
        "BOUNDS": (
            "const unsigned int first = 0u, count = length;"
            if layout.mask is None
            else f"const unsigned int first = bounds[{at}], count = bounds[{at} + 1u];"
        ),
        "SPLITS": _SPLITS.format(
            span=_BLOCKS * 4 - 1,
            spanned=_BLOCKS * 4,
            few=_BLOCKS // 2 * _FEWEST,
            fewest=_FEWEST,
            fewer=_FEWER,
            alone=_alone(layout.width),
            most=1 << 30 if layout.by_matrix else _MOST,
        ),
    }


@functools.cache
def _attention_text(layout: _Layout) -> tuple[str, int]:
    """The text, and the threads of a block."""
    known = _shared(layout)
    by_matrix = layout.by_matrix
    values, threads = _matrix_constants(layout) if by_matrix else _plain_constants(layout)
    known |= _mask_lines(layout, by_matrix)
    known["THREADS"] = str(threads)
    alone = threads > 256 or values.get("NT") == 2  # on a multiprocessor
    known["RESIDENT"] = ", 1" if alone else ", 2"
    values |= {"D": layout.width, "NH": layout.heads, "THREADS": threads, "MAX_KEYS": _MOST}
    known["CONSTANTS"] = _constants(layout.dtype, **values, RECORD=source.RECORD, FEW=source.FEW)
    pointers = [f"const @T@* {name}" for name in ("query_at", "keys_at", "values_at")]
    if layout.mask is not None:
        pointers.append(f"const {kinds()[layout.mask].c}* mask_at")
        pointers += [] if layout.adds else ["const unsigned int* bounds"]
    pointers += ["float* parts", "float2* of_splits", "@T@* out"]
    pointers += ["unsigned int* bounds"] if layout.adds else []
    numbers = ["kv_heads", "queries", "max_splits", *(["length"] if layout.mask is None else [])]
    numbers += ["query_batch", "query_kv", "query_head", "query_stride"]
    numbers += ["key_batch", "key_head", "key_stride", "value_batch", "value_head", "value_stride"]
    numbers += [] if layout.mask is None else ["mask_batch", "mask_query", "mask_stride"]
    parameters = [*pointers, *(f"unsigned int {name}" for name in numbers), "float scale"]
    known = {"PARAMETERS": ", ".join(parameters), "LAST": source.LAST if layout.adds else "", **known}
    if not by_matrix:
        return _filled(source.ATTENTION, known), threads
    kind = kinds()[layout.dtype]
    half = kind.load.startswith("from_f16")
    known |= {"PAIR": "pair_f16" if half else "pair_bf16", "ROUNDED": kind.rounded.format("share[i]")}
    known["MULTIPLY"] = matrices.multiplication(layout.dtype)
    return _filled(matrices.ATTENTION, known), threads


def _matrix_constants(layout: _Layout) -> tuple[dict[str, int], int]:
    """What :mod:`attention_tensor_source` counts by, and the threads of a block."""
    return {
        "NT": -(-layout.heads // 8),
        "KT": max(1, min(4, 512 // layout.width)),
        "VT": 1,
    }, 256


def _plain_constants(layout: _Layout) -> tuple[dict[str, int], int]:
    """What :data:`attention_source.ATTENTION` counts by, and the threads of a block."""
    elements = _WORD // layout.dtype.itemsize  # of a word
    chunks = layout.width // elements
    heads = 1 << (layout.heads - 1).bit_length()
    at_once = min(heads, 8)  # heads of a thread that reads values
    in_warp = min(heads, 4)  # heads of a warp that reads keys
    loads = 8 // max(1, chunks // 32)  # keys of a lane
    if chunks < 32:
        loads = max(1, min(loads, 2 * chunks // in_warp))
    values = {"NP": heads, "HW": in_warp, "HV": at_once, "KT": loads, "VE": elements, "AHEAD": 4}
    return values, 256 * (heads // at_once)


def _mask_lines(layout: _Layout, by_matrix: bool) -> dict[str, str]:
    import torch

    score = f"__fmul_rn({'share' if by_matrix else 'sum'}[i], scale)"
    if layout.mask is None:
        return {"MASK_LINE": "", "MASK_LOADS": "", "MASKED": score}
    kind = kinds()[layout.mask]
    line = "const unsigned int mask_from = batch * mask_batch + query * mask_query + first * mask_stride;"
    key = "done + lane * 4 + i" if by_matrix else "base + (own + i) / HW * SUB + sub"
    own = "4" if by_matrix else "OWN"
    loads = f"""{kind.c} bits[{own}];
      #pragma unroll
      for (int i = 0; i < {own}; ++i) bits[i] = mask_at[mask_from + (begin + min({key}, end)) * mask_stride];"""
    if layout.mask == torch.bool:
        masked = f"(bits[i] ? {score} : minus_infinity)"
    else:
        masked = f"__fadd_rn({score}, {kind.load.format('bits[i]')})"
    return {"MASK_LINE": line, "MASK_LOADS": loads, "MASKED": masked}


@functools.cache
def _sum_text(layout: _Layout) -> tuple[str, int]:
    """The text, and the threads of a block."""
    threads = 8 * min(layout.width, 32)
    known = _shared(layout)
    known["THREADS"] = str(threads)
    known["CONSTANTS"] = _constants(layout.dtype, D=layout.width, NH=layout.heads, THREADS=threads, MANY=source.MANY)
    pointers = ["const float* parts", "const float2* of_splits"]
    pointers += [] if layout.mask is None else ["const unsigned int* bounds"]
    numbers = ["kv_heads", "queries", "max_splits", *(["length"] if layout.mask is None else [])]
    parameters = [*pointers, "@T@* out", *(f"unsigned int {name}" for name in numbers)]
    return _filled(source.SUM, {"PARAMETERS": ", ".join(parameters), **known}), threads
