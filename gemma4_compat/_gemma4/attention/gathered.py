"""Keys, or values, as the calls of :mod:`windows` take them. A key is in two blocks, or three.

Its gradient is the sum of what these blocks and all heads that share it give. One sum in float32, rounded once, is as
exact as the gradient of one call; a sum for each block, rounded and added, is up to 1.4 times as far off.
"""

from __future__ import annotations

from typing import Any

import torch

from gemma4_compat._gemma4.attention.block_layout import Layout


def gathered(tensor: Any, layout: Layout, groups: int) -> tuple[Any, Any, Any]:
    """For the calls before those of whole blocks, for these, and after them: each head ``groups`` times.

    Args:
        tensor: (rows, heads, keys, width).
        layout: of the calls.
        groups: heads of queries that share a head of keys.

    Returns:
        (rows, heads * groups, keys, width), (rows * blocks, heads * groups, keys, width) and the shape of the first.
    """
    found: tuple[Any, Any, Any] = _Gathered.apply(tensor, layout, groups)
    return found


class _Gathered(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(tensor: Any, layout: Layout, groups: int) -> tuple[Any, Any, Any]:
        parts = [part[:, :, :, None].expand(-1, -1, -1, groups, -1, -1) for part in _parts(tensor, layout)]
        middle = torch.cat(parts, dim=4)
        return (
            tensor[:, :, layout.head[1]].repeat_interleave(groups, 1),
            middle.flatten(2, 3).flatten(0, 1),
            tensor[:, :, layout.tail[1]].repeat_interleave(groups, 1),
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, Layout, int], output: Any) -> None:
        tensor, ctx.layout, ctx.groups = inputs
        ctx.shape, ctx.dtype = tensor.shape, tensor.dtype

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        layout = ctx.layout
        rows, heads = ctx.shape[:2]
        exact = torch.promote_types(ctx.dtype, torch.float32)
        total = torch.zeros(ctx.shape, dtype=exact, device=gradients[0].device)
        head, middle, tail = (each.unflatten(1, (heads, ctx.groups)) for each in gradients)
        total[:, :, layout.head[1]] += head.sum(2, dtype=exact)
        total[:, :, layout.tail[1]] += tail.sum(2, dtype=exact)
        middle = middle.unflatten(0, (rows, layout.count))
        for part, gradient in zip(_parts(total, layout), middle.split(layout.unit, dim=4)):
            part += gradient.sum(3, dtype=exact)
        return total.to(ctx.dtype), None, None


def _parts(tensor: Any, layout: Layout) -> list[Any]:
    """The first unit of all whole blocks, as a view, their second unit, and so on: each (rows, blocks, heads, unit,
    width). Those of a block beside each other are its keys.
    """
    step, number, count = layout.block // layout.unit, layout.width // layout.unit, layout.count
    begin = layout.start + layout.first * layout.block
    span = tensor[:, :, begin : begin + (step * (count - 1) + number) * layout.unit]
    units = span.unflatten(2, (-1, layout.unit)).transpose(1, 2)
    return [units[:, at : at + step * (count - 1) + 1 : step] for at in range(number)]
