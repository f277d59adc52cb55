"""Attention of wide heads in training by matrix products, a block of queries at a time.

Heads of full layers are 512 wide. Only one of PyTorch's kernels for ``scaled_dot_product_attention`` takes such heads
without keeping the scores of all pairs, and its backward pass is slow. Here a block's scores are one product, in
float32. The backward pass computes them again, and takes four more. Keys and values are not repeated for each head of
the queries, and keys that no query of a block sees are left out.

With ``torch.use_deterministic_algorithms`` that kernel's backward pass takes the keys of a head one tile after the
other, and most of a GPU waits. Products add in one order, so then they take heads of any width, if there are too few
queries for :mod:`windows`.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator
from typing import Any

import torch

from gemma4_compat._gemma4.accelerate import attached
from gemma4_compat._gemma4.attention import layers, packing, tracing
from gemma4_compat._gemma4.attention.flash import WIDEST

_log = logging.getLogger("gemma4_compat")
#: What queries, keys and values may be.
DTYPES = (torch.bfloat16, torch.float16)
#: Queries of a block, at most and at least, and scores of one: 256 MiB in float32.
_MOST, _LEAST, _SCORES = 512, 16, 2**26
#: Keys that the first and the last query of each block may see: from the first one to before the second.
Spans = tuple[tuple[int, int], ...]


def takes(width: int) -> bool:
    """Whether products are for heads of this width."""
    return width > WIDEST or torch.are_deterministic_algorithms_enabled()


def serve(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> bool:
    """Whether a layer that trains may be computed by products, as far as its tensors say.

    Queries, keys and values are (rows, heads, tokens, width), a mask is (rows or 1, heads or 1, queries, keys), or
    ``packing.by_text`` stands for it. Without one, each query sees the keys up to its own.
    """
    if not layers.is_text(module) or not module.training or not takes(query.shape[-1]):
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

    ``window``: of the layer, for what stands for a mask, which does not hold it. ``every``: a block is computed with
    every key up to its last query's, as far as the window reaches, whatever the values of the mask.
    """
    rows, heads, queries, _ = query.shape
    block = max(_LEAST, min(_MOST, _SCORES // (rows * heads * key.shape[2]) // _LEAST * _LEAST))
    if mask is None or every or not _has_memory(mask):
        reach = (window or queries) - 1
        spans: Spans = tuple((max(at - reach, 0), min(at + block, queries)) for at in range(0, queries, block))
    else:
        spans = tracing.once(mask, attached.SPANS, _spans, queries, block, window)
    return _Products.apply(query, key, value, mask, scaling, block, spans, window)


def _spans(mask: Any, queries: int, block: int, window: int | None) -> Spans:
    """Which keys the queries of each block see."""
    keys = slice(0, mask.shape[3])
    parts = (packing.part(mask, slice(at, at + block), keys, window) for at in range(0, queries, block))
    seen = torch.stack([part.any(dim=2).flatten(0, 1).any(dim=0) for part in parts]).byte()
    first, after = seen.argmax(dim=1), mask.shape[3] - seen.flip(1).argmax(dim=1)
    return tuple(zip(first.tolist(), after.tolist()))  # of a block that sees nothing: all keys


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
    """A block of queries, and memory for its scores. All blocks of a call share it: their sizes differ, which would
    leave gaps in that of the allocator.
    """

    def __init__(
        self, query: Any, key: Any, mask: Any, scaling: float, block: int, spans: Spans, window: int | None
    ) -> None:
        self._query, self._keys, self._mask = query, key.flatten(0, 1), mask
        self._scaling, self._window = scaling, window
        most = query.shape[0] * query.shape[1] * block * max(after - first for first, after in spans)
        self._scores, self._shares = (query.new_empty(most, dtype=torch.float32) for _ in range(2))
        self._rounded = query.new_empty(most)
        if mask is None:
            self._later = torch.ones(block, block, dtype=torch.bool, device=query.device).triu(1)

    def enter(self, part: slice, span: tuple[int, int]) -> None:
        """Go to the queries ``part``, which see keys in ``span``."""
        self.part, self.span = part, slice(*span)
        self.queries, self.keys = self.grouped(self._query[:, :, part]), self._keys[:, self.span]
        self.shape = *self.queries.shape[:2], span[1] - span[0]

    def grouped(self, tensor: Any) -> Any:
        """(rows, heads, queries, width) as (rows * heads of the keys, queries of all heads that share one, width)."""
        return tensor.reshape(len(self._keys), -1, tensor.shape[3])

    def by_head(self, tensor: Any) -> Any:
        """The reverse."""
        return tensor.view(*self._query.shape[:2], -1, tensor.shape[2])

    def space(self, buffer: Any) -> Any:
        """The part of the buffer that this block takes."""
        return buffer[: math.prod(self.shape)].view(self.shape)

    def product(self, left: Any, right: Any) -> Any:
        """In float32, where the scores were."""
        return _multiply(left, right, self.space(self._scores))

    def rounded(self, tensor: Any) -> Any:
        """In 16 bits."""
        return self.space(self._rounded).copy_(tensor)

    def shares(self) -> Any:
        """How much of each value goes into the output, float32. Zero for a query that sees no key."""
        scores = self.product(self.queries, self.keys.transpose(1, 2))
        if self._scaling != 1:
            scores *= self._scaling
        by_head = self.by_head(scores)
        if self._mask is None:
            tokens = by_head.shape[2]
            by_head[..., self.part.start :].masked_fill_(self._later[:tokens, :tokens], float("-inf"))
            return torch.softmax(scores, dim=-1, out=self.space(self._shares))
        hidden = ~packing.part(self._mask, self.part, self.span, self._window)
        by_head.masked_fill_(hidden, torch.finfo(torch.float32).min)
        found = torch.softmax(scores, dim=-1, out=self.space(self._shares))
        self.by_head(found).masked_fill_(hidden, 0.0)
        return found


def _blocks(
    query: Any, key: Any, mask: Any, scaling: float, block: int, spans: Spans, window: int | None
) -> Iterator[_Block]:
    """Each block, one at a time; of tensors without memory the last two, which take as much as any."""
    found = _Block(query, key, mask, scaling, block, spans, window)
    for index, span in enumerate(spans):
        if index < len(spans) - 2 and not _has_memory(query):
            continue
        found.enter(slice(index * block, min((index + 1) * block, query.shape[2])), span)
        yield found


class _Products(torch.autograd.Function):  # type: ignore[misc]
    """(query, key, value, mask, scaling, queries of a block, spans, window) -> (rows, queries, heads, width)."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Any,
        key: Any,
        value: Any,
        mask: Any,
        scaling: float,
        block: int,
        spans: Spans,
        window: int | None,
    ) -> Any:
        found = query.new_empty(len(query), query.shape[2], query.shape[1], value.shape[3])
        ctx.save_for_backward(query, key, value, mask, found)
        ctx.given = scaling, block, spans, window
        values = value.flatten(0, 1)
        with torch.autocast(query.device.type, enabled=False):
            for one in _blocks(query, key, mask, *ctx.given):
                outputs = torch.bmm(one.rounded(one.shares()), values[:, one.span])
                found[:, one.part] = one.by_head(outputs).transpose(1, 2)
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, incoming: Any) -> Any:
        query, key, value, mask, outputs = ctx.saved_tensors
        scaling = ctx.given[0]
        values, of_query = value.flatten(0, 1), torch.empty_like(query)
        shapes = (values.shape[0], key.shape[2], key.shape[3]), values.shape
        of_keys, of_values = (torch.zeros(shape, dtype=torch.float32, device=key.device) for shape in shapes)
        with torch.autocast(query.device.type, enabled=False):
            for one in _blocks(query, key, mask, *ctx.given):
                shares = one.shares()
                gradient = one.grouped(incoming[:, one.part].transpose(1, 2))
                output = one.grouped(outputs[:, one.part].transpose(1, 2))
                total = (gradient.float() * output.float()).sum(dim=-1, keepdim=True)
                _multiply(one.rounded(shares).transpose(1, 2), gradient, of_values[:, one.span], add=True)
                scores = one.product(gradient, values[:, one.span].transpose(1, 2)).sub_(total).mul_(shares)
                if scaling != 1:
                    scores *= scaling
                scores = one.rounded(scores)
                of_query[:, :, one.part] = one.by_head(torch.bmm(scores, one.keys))
                _multiply(scores.transpose(1, 2), one.queries, of_keys[:, one.span], add=True)
        of_key, of_value = of_keys.to(key.dtype).view(key.shape), of_values.to(value.dtype).view(value.shape)
        return of_query, of_key, of_value, *(None,) * 5
