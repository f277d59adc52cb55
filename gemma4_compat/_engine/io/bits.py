"""Bitwise equality of tensors."""

from __future__ import annotations

from typing import Any


def same_bits(one: Any, other: Any) -> bool:
    """Whether two tensors of the same shape, dtype and device have the same bits; every NaN equals every other NaN."""
    import torch

    if not one.is_floating_point():
        return bool(torch.equal(one, other))
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    same = one.contiguous().view(integer) == other.contiguous().view(integer)
    return bool((same | (one.isnan() & other.isnan())).all())
