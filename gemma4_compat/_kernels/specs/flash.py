"""Attention of many queries over a cache, in one pass over the keys: a kernel with custom numerics.

PyTorch's kernel with a mask computes the scores of all keys that are allocated, has no fast way for heads that are
512 wide, and needs a copy of keys and values for each query head. Here the rows of a block are the query heads of
consecutive tokens that share keys, and a block walks over the keys from the first to the last one that its mask lets
through, in tiles (FlashAttention: Dao et al. 2022). Scores and sums are in ``float``. Softmax weights are
rounded to the dtype of the values before they are multiplied, as in PyTorch's; their sum is that of what was rounded.

A result has the same bits whatever the length of the cache, the other sequences, and where a prompt was cut: tiles
count from the first valid key, and what others of a block see does not change a row. (In a sliding layer tiles count
from the first key of a block of 64 or 128 rows: cuts at multiples of 128 tokens change nothing.)
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from gemma4_compat._gemma4 import host
from gemma4_compat._kernels.programs import FAR, Kernel, instance, kinds
from gemma4_compat._kernels.specs.attention import are_readable, rows_of

#: In a cache with fewer positions attention is PyTorch's: little is computed.
POSITIONS = 2048
#: Query heads that share a key-value head.
MAX_HEADS = 32
_THREADS = 256
_RECORD = 4  # integers that the bounds kernel writes for each query
_LOG2_E = 1.4426950408889634
#: Up to so many heads there are two blocks for each row, one for every other tile: 512 tokens of an E2B are only 64.
_FEW_HEADS = 8
#: Keys of a block after which its sums go to memory.
_SEGMENT = 8192
#: Rows of such sums, at most: 32 MiB for heads that are 512 wide. And tokens, at least.
_AT_ONCE, _TOKENS = 16_384, 128
#: Bytes that such sums take, unless there are many heads: see :func:`workspace`.
WORKSPACE = 4 * 512 * _AT_ONCE


@dataclass(frozen=True)
class Call:
    """A call of ``scaled_dot_product_attention`` that the kernels compute.

    Its query is (batch, heads, tokens, width); keys and values are (batch, key-value heads, keys, width). The mask is
    (batch, tokens, keys), bool, expanded; None: token i attends to keys 0 to i.
    """

    query: Any
    key: Any
    value: Any
    mask: Any
    scale: float


@dataclass(frozen=True)
class Tiling:
    """How a kernel is divided.

    Attributes:
        rows: of a block.
        keys: of a tile.
        by_rows: parts among warps of the rows of scores.
        by_keys: of their keys.
        by_width: of their dimensions.
        shared_room: whether sums of scores are exchanged where the keys were.
    """

    rows: int
    keys: int
    by_rows: int
    by_keys: int
    by_width: int
    shared_room: bool = False

    def room(self, width: int) -> int:
        """Bytes of shared memory."""
        line = 2 * width
        fixed = (self.rows + 2 * self.keys) * line + self.rows * (2 * self.keys + 16) + self.rows * 16
        if self.shared_room:
            return fixed
        pieces = self.rows // self.by_rows // 16 * (self.keys // self.by_keys // 8)
        own = pieces // self.by_width
        exchanged = 8 * own * 512 if self.by_width > 1 else 0
        return fixed + exchanged + self.rows * 4 * 8


#: By width of a head: the first that fits is taken.
_TILINGS = {
    256: (Tiling(128, 64, 4, 2, 1), Tiling(64, 32, 2, 2, 2)),
    512: (Tiling(64, 64, 2, 2, 2), Tiling(64, 32, 2, 2, 2), Tiling(32, 32, 2, 2, 2, shared_room=True)),
}


def tiling(width: int, shared: int) -> Tiling | None:
    """How heads of this width are computed in so many bytes of shared memory; None if they cannot be."""
    return next((one for one in _TILINGS[width] if one.room(width) <= shared), None)


def shared_memory(device: Any) -> int:
    """Bytes of shared memory that a block may have; 0 where there are no kernels: AMD's, and before 8.0."""
    import torch

    if device.type != "cuda":
        return 227 << 10  # where kernels are emulated
    found = host.capability(device)
    if found is None or found < (8, 0):
        return 0
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


def serves(heads: int, kv_heads: int, width: int) -> bool:
    """Whether there are kernels for heads of this kind and number."""
    return width in _TILINGS and heads % kv_heads == 0 and heads // kv_heads <= MAX_HEADS


def reaches(heads: int, kv_heads: int, width: int, *, tokens: int, keys: int, batch: int = 1) -> bool:
    """Whether offsets of 32 bits reach so many tokens and keys of each sequence.

    ``batch``: sequences whose queries, keys and masks are packed; :func:`match` looks at the tensors.
    """
    packed = batch * max(heads * tokens * width, kv_heads * keys * width, tokens * keys)
    return max(tokens * heads, keys) * width < FAR and packed < FAR


def workspace(batch: int, heads: int, width: int) -> int:
    """Bytes at most that kernels take for sums, beside what they return."""
    return max(WORKSPACE, 4 * (width + 2) * batch * heads * _streams(heads) * _TOKENS)


def _streams(heads: int) -> int:
    """Blocks that compute a row together."""
    return 2 if heads <= _FEW_HEADS else 1


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

    As :func:`attention.match`, of bfloat16 or float16: a mask must be bool, and heads are not packed. ``is_causal`` is
    only for calls without a mask, and with as many keys as tokens.
    """
    import torch

    if dropout_p or not are_readable(query, key, value, (torch.bfloat16, torch.float16)):
        return None
    batch, heads, tokens, width = query.shape
    kv_heads, length = key.shape[1], key.shape[2]
    scale = width**-0.5 if scale is None else float(scale)
    if (
        min(heads, tokens, length) < 1
        or not serves(heads, kv_heads, width)
        or not reaches(heads, kv_heads, width, tokens=tokens, keys=length)
        or (heads != kv_heads and not enable_gqa)
        or scale <= 0
    ):
        return None
    if attn_mask is None:
        return Call(query, key, value, None, scale) if is_causal and tokens == length else None
    if is_causal or attn_mask.dtype != torch.bool:
        return None
    mask = rows_of(attn_mask, query, length)
    if mask is None or mask.stride(2) != 1:
        return None
    return Call(query, key, value, mask.expand(batch, tokens, length), scale)


def bounds(mask: Any) -> tuple[Kernel, Any]:
    """The kernel that finds the valid keys of each token of ``Call.mask``, and what it writes: an argument of
    :func:`kernels`, for all calls with this mask.
    """
    import torch

    batch, tokens, length = mask.shape
    found = torch.empty((batch, tokens, _RECORD), dtype=torch.int32, device=mask.device)
    sizes = (tokens, length, *mask.stride()[:2])
    text, grid = instance("flash.cuh", "flash::bounds", _THREADS), (batch * tokens, 1)
    return Kernel(text, (mask, found), 1, sizes, block=_THREADS, grid=grid), found


def kernels(call: Call, found: Any = None, layout: Layout | None = None) -> tuple[list[Kernel], Any]:
    """The kernels that compute a call, in order, and its result, not yet written.

    Args:
        call: from :func:`match`.
        found: what the kernel of :func:`bounds` writes, launched before, if the call has a mask. None: it comes first.
        layout: of another call that has as many heads; None for its own.

    Returns:
        the kernels, and a tensor (batch, heads, tokens, width). In memory its tokens come before its heads, as in
        PyTorch's.
    """
    import torch

    query, key, value, mask = call.query, call.key, call.value, call.mask
    batch, heads, tokens, width = query.shape
    kv_heads = key.shape[1]
    layout = layout or layout_of(call)
    how = layout.how
    launched: list[Kernel] = []
    if mask is not None and found is None:
        first, found = bounds(mask)
        launched.append(first)
    result = torch.empty((batch, tokens, heads, width), dtype=query.dtype, device=query.device)
    reads = [query, key, value, *((key, key) if mask is None else (mask, found))]  # keys in place of what is not read
    sizes = (kv_heads, query.stride(0), layout.heads * query.stride(1), query.stride(1), query.stride(2))
    sizes += (*key.stride()[:3], *value.stride()[:3], *((0, 0) if mask is None else mask.stride()[:2]))
    scale, outer, text, room = call.scale * _LOG2_E, batch * kv_heads, _text(layout), how.room(width)
    if not layout.segment:
        grid = (-(-tokens * layout.heads // how.rows), outer)
        of = (tokens, 0, *sizes, scale)
        kernel = Kernel(text, (*reads, *[result] * 3), 3, of, block=_THREADS, grid=grid, shared=room)
        return [*launched, kernel], result.transpose(1, 2)
    at_once = max(_AT_ONCE // (1 << (batch * heads * layout.streams - 1).bit_length()), _TOKENS)
    blocks = -(-min(tokens, at_once) * layout.heads // how.rows)
    padded = blocks * how.rows
    new = functools.partial(torch.empty, dtype=torch.float32, device=query.device)
    parts = [new((outer, layout.streams, padded, width)), new((outer, layout.streams, padded, 2))]
    for begin in range(0, tokens, at_once):
        grid = (blocks * layout.streams, outer)
        of = (tokens, begin, *sizes, scale)
        launched.append(Kernel(text, (*reads, *parts, result), 3, of, block=_THREADS, grid=grid, shared=room))
        grid = (-(-padded * width // (4 * _THREADS)), outer)
        counts = (tokens, begin, kv_heads, padded, scale)
        launched.append(Kernel(_sum_text(layout), (*parts, result), 1, counts, block=_THREADS, grid=grid))
    return launched, result.transpose(1, 2)


@dataclass(frozen=True)
class Layout:
    """What a kernel's text depends on: ``heads`` share keys, ``streams`` blocks compute a row together, and after
    ``segment`` keys of a block its sums go to memory; 0: they do not, and no second kernel adds up what is there.
    """

    dtype: Any
    width: int
    heads: int
    streams: int
    segment: int
    masked: bool
    how: Tiling


def layout_of(call: Call, how: Tiling | None = None) -> Layout:
    """The layout of the kernels of a call. ``how``: None for what fits on the device."""
    how = how or tiling(call.query.shape[3], shared_memory(call.query.device))
    assert how is not None  # or the device has no kernels
    heads, kv_heads = call.query.shape[1], call.key.shape[1]
    streams = _streams(heads)
    segment = _SEGMENT if streams > 1 or call.key.shape[2] > _SEGMENT else 0
    shared, masked = heads // kv_heads, call.mask is not None
    return Layout(call.query.dtype, call.query.shape[3], shared, streams, segment, masked, how)


@functools.cache
def _text(layout: Layout) -> str:
    how = layout.how
    tile = (how.rows, how.keys, how.by_rows, how.by_keys, how.by_width, layout.segment // how.keys)
    sizes = (layout.width, layout.heads, layout.streams, *tile, int(how.shared_room), how.room(layout.width))
    return instance("flash.cuh", "flash::attend", kinds()[layout.dtype].name, layout.masked, *sizes)


@functools.cache
def _sum_text(layout: Layout) -> str:
    return instance("flash.cuh", "flash::sum", kinds()[layout.dtype].name, layout.width, layout.heads, layout.streams)
