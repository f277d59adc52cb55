"""Attention of wide heads in training by matrix products, a block of queries at a time.

Heads of full layers are 512 wide. Only one of PyTorch's kernels for ``scaled_dot_product_attention`` takes such heads
without keeping the scores of all pairs, and its backward pass is slow. Here a block's scores are one product, in
float32. The backward pass computes them again, and takes four more. Keys and values are not repeated for each head of
the queries, and keys that no query of a block sees are left out.

Products add in one order, and PyTorch's kernels do not: two runs of one script drift apart. Where algorithms must be
deterministic, these take the keys of a head one tile after the other, and most of a GPU waits. So products take heads
of any width. Sliding layers have short blocks of queries, windows, each with its own keys, and one product is for all
windows that memory has room for.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from gemma4_compat._gemma4.accelerate import attached
from gemma4_compat._gemma4.attention import layers, packing, tracing
from gemma4_compat._gemma4.attention.block_layout import UNIT, Layout
from gemma4_compat._gemma4.attention.flash import WIDEST

_log = logging.getLogger("gemma4_compat")
#: What queries, keys and values may be.
DTYPES = (torch.bfloat16, torch.float16)
#: Queries of a block, at most and at least, and scores of one: 256 MiB in float32.
_MOST, _LEAST, _SCORES = 512, 16, 2**26
#: Queries of a window, a part of :data:`UNIT`. Fewer have fewer scores of keys that they do not see, and keys are then
#: in more windows.
_WINDOW = 128
#: Whether two operators compute what is between products, on a device and in a dtype. The patch says so: kernels are
#: in a room above.
are_fused: Callable[[Any, Any], bool] | None = None
#: Keys that the first and the last query of each block may see: from the first one to before the second.
Spans = tuple[tuple[int, int], ...]


class Piece(NamedTuple):
    """What is computed at once: a block of queries, or several windows.

    Attributes:
        at: the first query.
        windows: how many windows, each a block of queries.
        first: the first key of the first window; those of each other are a block later. It may be negative: what is
            not there is not seen.
        after: where the keys of the first window end, likewise.
    """

    at: int
    windows: int
    first: int
    after: int


Pieces = tuple[Piece, ...]


def serve(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> bool:
    """Whether a layer that trains may be computed by products, as far as its tensors say.

    Queries, keys and values are (rows, heads, tokens, width), a mask is (rows or 1, heads or 1, queries, keys), or
    ``packing.by_text`` stands for it. Without one, each query sees the keys up to its own.
    """
    if not layers.is_text(module) or not module.training:
        return False
    if query.dtype not in DTYPES or {key.dtype, value.dtype} != {query.dtype}:
        return False
    if kwargs.get("dropout") or kwargs.get("position_bias") is not None or kwargs.get("is_causal") is False:
        return False
    keys = key.shape[2]
    if mask is None:
        return query.shape[2] == keys and getattr(module, "is_causal", True)
    return mask.dtype in (torch.bool, torch.int32) and packing.fits(mask, query, keys)


def are_known() -> bool:
    """Whether this torch has products of 16-bit tensors in float32, on some devices."""
    return "dtype" in torch.ops.aten.bmm.overloads()


@functools.cache
def work(device: Any, dtype: Any) -> bool:
    """Whether a device computes them. Tried once; if it does not, the log says why."""
    values = torch.ones(1, 16, 16, device=device, dtype=dtype)
    found = torch.zeros_like(values, dtype=torch.float32)
    try:
        for add in (False, True):
            _multiply(values, values, found, add=add)
        reason = "" if (found == 32).all() else "they are wrong"
    except (TypeError, NotImplementedError, RuntimeError) as error:
        reason = " ".join(str(error).split())
    if reason:
        _log.warning("no products of %s in float32 on %s, so sdpa computes full layers: %.200s", dtype, device, reason)
    return not reason


def attention(
    query: Any, key: Any, value: Any, mask: Any, scaling: float, *, window: int | None = None, every: bool = False
) -> Any:
    """(rows, queries, heads, width) of what :func:`serve` takes.

    ``window``: of the layer. ``every``: a block is computed with every key up to its last query's, as far as the
    window reaches, unless the mask shows others. So it does not depend on padding, or on where texts begin.
    """
    rows, heads, queries, width = query.shape
    layout = shown = None
    if width <= WIDEST and window is not None and mask is not None:
        layout = tracing.once(mask, attached.LAYOUT, _layout, window, _WINDOW)
    if layout is not None:
        block, pieces = layout.block, _windows(layout, rows * heads)
        shown = tracing.made(mask, attached.WINDOWS, packing.blocks, rows, layout, window)
    else:
        block = max(_LEAST, min(_MOST, _SCORES // (rows * heads * key.shape[2]) // _LEAST * _LEAST))
        if mask is None or not _has_memory(mask) or (every and packing.is_by_text(mask)):
            spans = _earlier(queries, block, None if mask is None else window)
        else:
            spans = tracing.once(mask, attached.SPANS, _every if every else _spans, queries, block, window)
        pieces = tuple(Piece(index * block, 1, *span) for index, span in enumerate(spans))
    return _Products.apply(query, key, value, mask, shown, scaling, block, pieces, window)


def _seen(mask: Any, queries: int, block: int, window: int | None) -> Any:
    """Which keys some query of each block sees, bool (blocks, keys)."""
    keys = slice(0, mask.shape[3])
    parts = (packing.part(mask, slice(at, at + block), keys, window) for at in range(0, queries, block))
    return torch.stack([part.any(dim=2).flatten(0, 1).any(dim=0) for part in parts])


def _spans(mask: Any, queries: int, block: int, window: int | None) -> Spans:
    """Which keys the queries of each block see."""
    return _spans_of(_seen(mask, queries, block, window))


def _spans_of(seen: Any) -> Spans:
    seen = seen.byte()
    first, after = seen.argmax(dim=1), seen.shape[1] - seen.flip(1).argmax(dim=1)
    return tuple(zip(first.tolist(), after.tolist()))  # of a block that sees nothing: all keys


def _every(mask: Any, queries: int, block: int, window: int | None) -> Spans:
    """The same for each mask that shows only earlier keys."""
    seen = _seen(mask, queries, block, window)
    widest, found, is_used = _earlier(queries, block, window), _spans_of(seen), seen.any(dim=1).tolist()
    inside = (
        first <= one and end <= after for (first, after), (one, end), used in zip(widest, found, is_used) if used
    )
    return widest if mask.shape[3] == queries and all(inside) else found


def _earlier(queries: int, block: int, window: int | None) -> Spans:
    """The keys up to each block's last query, as far as the window reaches."""
    reach = (window or queries) - 1
    return tuple((max(at - reach, 0), min(at + block, queries)) for at in range(0, queries, block))


def _layout(mask: Any, window: int, block: int) -> Layout | None:
    """Windows of so many queries, each with the keys that the mask shows to any. None if that are all keys."""
    by_text = packing.is_by_text(mask)
    queries, keys = mask.shape[3 if by_text else 2], mask.shape[3]
    before, after = window - 1, 0
    if not by_text and _has_memory(mask):
        first = torch.arange(keys - queries, keys, block, device=mask.device)[:, None]
        away = (torch.arange(keys, device=mask.device) - first).where(_seen(mask, queries, block, window), 0)
        least, most = torch.stack(away.aminmax()).tolist()
        before, after = max(before, -least), max(after, most - block + 1)
    before, after = (-(-one // UNIT) * UNIT for one in (before, after))  # a graph serves images at other places
    found = Layout(block, block, queries, keys, keys - queries - before, before + block + after, 0, queries // block)
    return found if found.count > 1 and found.width < keys else None


def _windows(layout: Layout, heads: int) -> Pieces:
    """As many at once as there is memory for, after a rest of queries. ``heads``: of all rows."""
    block, count = layout.block, layout.count
    parts = min(count, -(-heads * count * block * layout.width // _SCORES))
    cuts = [count * part // parts for part in range(parts + 1)]
    found = [(count, 1)] if layout.queries % block else []
    found += [(begin, end - begin) for begin, end in itertools.pairwise(cuts)]
    starts = ((at * block, windows, layout.start + at * block) for at, windows in found)
    return tuple(Piece(at, windows, first, first + layout.width) for at, windows, first in starts)


def _has_memory(tensor: Any) -> bool:
    """Plans count tensors without."""
    return type(tensor) is torch.Tensor


def _multiply(left: Any, right: Any, found: Any, *, add: bool = False) -> Any:
    """The product of 16-bit tensors, (batch, rows, columns), written or added to ``found`` in float32."""
    if not _has_memory(left):
        return found
    if not left.is_cuda:
        product = torch.bmm(left.float(), right.float())
        return found.add_(product) if add else found.copy_(product)
    if add:
        return torch.baddbmm(found, left, right, out_dtype=torch.float32, out=found)
    return torch.bmm(left, right, out_dtype=torch.float32, out=found)


class _Block:
    """The queries of a piece, and memory for its scores. All pieces of a call share it: their sizes differ, which
    would leave gaps in that of the allocator.

    Queries, and what belongs to them, are in one of three forms: (rows, heads, queries, width); :meth:`split` into
    windows; and :meth:`grouped`, a matrix for each window. A matrix has one head after the other. If there are several
    windows, it has one query after the other, as a layer does: nothing is copied if all heads share one of the keys.
    """

    def __init__(
        self,
        query: Any,
        key: Any,
        mask: Any,
        shown: Any,
        scaling: float,
        block: int,
        pieces: Pieces,
        window: int | None,
    ) -> None:
        self._query, self._mask, self._by_window, self._pieces = query, mask, shown, pieces
        self._scaling, self._block, self._window = scaling, block, window
        self.heads, self._count = key.shape[1:3]
        ends = max(one.after + (one.windows - 1) * block for one in pieces)
        self.outside = max(0, -min(one.first for one in pieces)), max(0, ends - key.shape[2])
        self.whole = self.padded(key)
        most = query.shape[0] * query.shape[1] * block * max(one.windows * (one.after - one.first) for one in pieces)
        self._scores, self._others = (query.new_empty(most, dtype=torch.float32) for _ in range(2))
        self._rounded = query.new_empty(most)
        self._fused = _has_memory(query) and are_fused is not None and are_fused(query.device, query.dtype)
        if mask is None:
            self._later = torch.ones(block, block, dtype=torch.bool, device=query.device).triu(1)

    def each(self) -> Iterator[_Block]:
        """Itself at each piece; of tensors without memory at the last two, which take as much as any."""
        for piece in self._pieces if _has_memory(self._query) else self._pieces[-2:]:
            at, self.windows, first, after = piece
            if self.windows == 1:
                first, after = max(first, 0), min(after, self._count)
            self.part = slice(at, min(at + self.windows * self._block, self._query.shape[2]))
            self.span = slice(first + self.outside[0], after + self.outside[0])
            self.queries, self.keys = self.grouped(self._query), self.seen(self.whole)
            self.shape = *self.queries.shape[:2], after - first
            self._shown = None if self._mask is None else self._seen(first, after)
            yield self

    def _seen(self, first: int, after: int) -> Any:
        """Which keys, (rows or 1, heads of the keys or 1, windows, heads that share one or 1, queries, keys)."""
        if self.windows == 1:
            shown = packing.part(self._mask, self.part, slice(first, after), self._window)[:, :, None]
        else:
            shown = self._by_window.unflatten(0, (len(self._query), -1)).transpose(1, 2)
            shown = shown[:, :, self.part.start // self._block :][:, :, : self.windows]
        return shown.unflatten(1, (1, 1) if shown.shape[1] == 1 else (self.heads, -1)).transpose(2, 3)

    def padded(self, tensor: Any) -> Any:
        """Keys or values as (rows * heads, keys, width), with those that windows have outside of the text."""
        return (torch.nn.functional.pad(tensor, (0, 0, *self.outside)) if any(self.outside) else tensor).flatten(0, 1)

    def seen(self, tensor: Any) -> Any:
        """What the windows see of that, (rows * heads * windows, keys, width)."""
        if self.windows == 1:
            return tensor[:, self.span]
        width = self.span.stop - self.span.start
        span = tensor[:, self.span.start : self.span.stop + (self.windows - 1) * self._block]
        return span.unfold(1, width, self._block).transpose(2, 3).flatten(0, 1)

    def add(self, found: Any, left: Any, right: Any) -> None:
        """Add a product to what the windows see. A key is in several: one after the other, in float32."""
        if self.windows == 1:
            _multiply(left, right, found[:, self.span], add=True)
            return
        product = found.new_empty(self.shape[0], self.shape[2], right.shape[2])
        parts = _multiply(left, right, product).unflatten(0, (-1, self.windows)).split(self._block, dim=2)
        for begin, part in zip(range(self.span.start, self.span.stop, self._block), parts, strict=True):
            keys = found[:, begin : begin + self.windows * self._block]
            keys.unflatten(1, (self.windows, self._block)).add_(part)

    def split(self, tensor: Any) -> Any:
        """The piece of (rows, heads, queries, width), as (rows, heads of the keys, windows, heads that share one,
        queries, width).
        """
        part = tensor[:, :, self.part].unflatten(2, (self.windows, -1)).unflatten(1, (self.heads, -1))
        return part.transpose(2, 3)

    def grouped(self, tensor: Any) -> Any:
        """The same as (rows * heads of the keys * windows, queries of all heads that share one, width)."""
        found = tensor if tensor.ndim == 6 else self.split(tensor)
        found = found if self.windows == 1 else found.transpose(3, 4)
        return found.reshape(-1, found.shape[3] * found.shape[4], found.shape[5])

    def by_head(self, tensor: Any) -> Any:
        """The reverse, in the form of :meth:`split`."""
        shape = len(self._query), self.heads, self.windows
        if self.windows == 1:
            return tensor.view(*shape, -1, self.part.stop - self.part.start, tensor.shape[2])
        return tensor.view(*shape, self._block, -1, tensor.shape[2]).transpose(3, 4)

    def space(self, buffer: Any) -> Any:
        """The part of the buffer that this piece takes."""
        return buffer[: math.prod(self.shape)].view(self.shape)

    def outputs(self, values: Any) -> Any:
        """The piece's outputs, from all values, in the form of :meth:`split`."""
        return self._seeing(self.by_head(torch.bmm(self.shares()[0], self.seen(values))))

    def shares(self) -> tuple[Any, Any]:
        """How much of each value goes into the output, in 16 bits, and what :meth:`gradients` is told of it."""
        scores = _multiply(self.queries, self.keys.transpose(1, 2), self.space(self._scores))
        if self._fused:
            rounded, sums = self.space(self._rounded), scores.new_empty((*self.shape[:2], 2))
            torch.ops.gemma4_compat.shares(*self._given(scores), rounded, sums)
            return rounded, (scores, sums)
        if self._scaling != 1:
            scores *= self._scaling
        by_head = self.by_head(scores)
        if self._shown is None:
            tokens = by_head.shape[4]
            by_head[..., self.part.start :].masked_fill_(self._later[:tokens, :tokens], float("-inf"))
        else:
            by_head.masked_fill_(~self._shown, torch.finfo(torch.float32).min)
        found = torch.softmax(scores, dim=-1, out=self.space(self._others))
        return self._in_16_bits(found), found

    def gradients(self, shares: Any, gradient: Any, outputs: Any, values: Any) -> Any:
        """Those of products of queries and keys, in 16 bits, from the output's gradient and the output, grouped."""
        total = gradient.float().mul_(outputs).sum(dim=-1, keepdim=True)
        buffer = self._others if self._fused else self._scores
        found = _multiply(gradient, self.seen(values).transpose(1, 2), self.space(buffer))
        if self._fused:
            (scores, sums), rounded = shares, self.space(self._rounded)
            torch.ops.gemma4_compat.share_gradients(*self._given(scores), sums, found, total, rounded)
            return rounded
        found.sub_(total)
        if self._scaling != 1:
            found, shares = found.mul_(shares), self._scaling
        return self._in_16_bits(found, shares)

    def gradient(self, incoming: Any) -> Any:
        """The output's gradient, grouped, zero for queries that see no key."""
        return self.grouped(self._seeing(self.split(incoming)))

    def _given(self, scores: Any) -> tuple[Any, ...]:
        """What kernels are told of scores."""
        queries = self.part.stop - self.part.start if self.windows == 1 else self._block
        sizes = self.heads, self.windows, self._query.shape[1] // self.heads, queries
        return scores, self._shown, sizes, self.windows > 1, self.part.start, float(self._scaling)

    def _seeing(self, tensor: Any) -> Any:
        """What is split, zero for queries that see no key. Their shares are not, unless kernels compute them."""
        if self._shown is None or self._fused:
            return tensor
        return torch.where(self._shown.any(dim=-1, keepdim=True), tensor, 0.0)

    def _in_16_bits(self, tensor: Any, factor: Any = None) -> Any:
        """Times a factor."""
        found = self.space(self._rounded)
        return found.copy_(tensor) if factor is None else torch.mul(tensor, factor, out=found)


class _Products(torch.autograd.Function):  # type: ignore[misc]
    """(query, key, value, mask, its windows, scaling, queries of a block, pieces, window) -> (rows, queries, heads,
    width).
    """

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any, shown: Any, *given: Any) -> Any:
        found = query.new_empty(len(query), query.shape[2], query.shape[1], value.shape[3])
        ctx.save_for_backward(query, key, value, mask, shown, found)
        ctx.given = given
        with torch.autocast(query.device.type, enabled=False):
            block = _Block(query, key, mask, shown, *given)
            values = block.padded(value)
            for one in block.each():
                one.split(found.transpose(1, 2)).copy_(one.outputs(values))
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, incoming: Any) -> Any:
        query, key, value, mask, shown, outputs = ctx.saved_tensors
        of_query = torch.empty_like(query)
        incoming, outputs = incoming.transpose(1, 2), outputs.transpose(1, 2)
        with torch.autocast(query.device.type, enabled=False):
            block = _Block(query, key, mask, shown, *ctx.given)
            values = block.padded(value)
            shapes = block.whole.shape, values.shape
            of_keys, of_values = (torch.zeros(shape, dtype=torch.float32, device=key.device) for shape in shapes)
            for one in block.each():
                rounded, found = one.shares()
                gradient = one.gradient(incoming)
                one.add(of_values, rounded.transpose(1, 2), gradient)
                scores = one.gradients(found, gradient, one.grouped(outputs), values)
                one.split(of_query).copy_(one.by_head(torch.bmm(scores, one.keys)))
                one.add(of_keys, scores.transpose(1, 2), one.queries)
        keys = slice(block.outside[0], block.outside[0] + key.shape[2])
        of_key, of_value = (
            found[:, keys].to(one.dtype).view(one.shape) for found, one in ((of_keys, key), (of_values, value))
        )
        return of_query, of_key, of_value, *(None,) * 6
