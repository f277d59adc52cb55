"""Looks at the values of a mask where attention is computed: whether they are possible, and one for all layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from gemma4_compat._models import prefill

_Found = TypeVar("_Found")


def is_real(tensor: Any) -> bool:
    """Whether it has values, and no subclass makes something else of it."""
    import torch

    return type(tensor) is torch.Tensor and not tensor.is_meta


def is_traced(tensor: Any) -> bool:
    """Whether something follows what is computed that a look at the mask would disturb."""
    import torch

    return (
        torch.jit.is_tracing()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or prefill.is_captured()
        or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def once(mask: Any, mark: str, key: tuple[Any, ...], look: Callable[[], _Found]) -> _Found:
    """What ``look`` finds. All layers get the same mask, so it is kept with the mask until that is written to.

    Args:
        mask: has it as an attribute.
        mark: the name of the attribute.
        key: what else it depends on.
        look: looks at the mask.
    """
    if mask.is_inference():  # it has no version
        return look()
    kept, key = getattr(mask, mark, None), (mask._version, *key)
    if kept is None or kept[0] != key:
        kept = key, look()
        setattr(mask, mark, kept)
    found: _Found = kept[1]
    return found
