"""Looks at the values of a mask where attention is computed: whether they are possible, and one for all layers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from gemma4_compat._models import prefill

_Found = TypeVar("_Found")

#: Per thread: ``noted``, the tensors whose looks are noted, and their list; ``told``, what looks have found already.
_inside = threading.local()


@dataclass
class Look:
    """A look at one of the tensors of a call.

    Attributes:
        place: of the mask among them.
        arguments: of :func:`once`, without the mask.
        found: what it found. Kernels depend on it.
    """

    place: int
    arguments: tuple[Any, ...]
    found: Any

    def finds_the_same(self, tensors: Sequence[Any]) -> bool:
        """Whether it does in these tensors of another call."""
        return bool(once(tensors[self.place], *self.arguments) == self.found)


@contextlib.contextmanager
def noted(tensors: Sequence[Any]) -> Iterator[list[Look]]:
    """Inside, this thread notes what it finds in the masks among ``tensors``."""
    found: list[Look] = []
    with _as(noted=(tensors, found)):
        yield found


@contextlib.contextmanager
def told(looks: Sequence[Look]) -> Iterator[None]:
    """Inside, this thread finds this, in this order, without a look: a capture cannot look."""
    with _as(told=iter(looks)):
        yield


@contextlib.contextmanager
def _as(**changed: Any) -> Iterator[None]:
    before = dict(vars(_inside))
    vars(_inside).update(changed)
    try:
        yield
    finally:
        vars(_inside).clear()
        vars(_inside).update(before)


def is_real(tensor: Any) -> bool:
    """Whether it has values, and no subclass makes something else of it."""
    import torch

    return type(tensor) is torch.Tensor and not tensor.is_meta


def is_traced(tensor: Any) -> bool:
    """Whether something follows what is computed that a look at the mask would disturb. Inside :func:`told` a capture
    does not.
    """
    import torch

    return (
        torch.jit.is_tracing()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or prefill.is_captured()
        or (tensor.is_cuda and not hasattr(_inside, "told") and torch.cuda.is_current_stream_capturing())
    )


def once(mask: Any, mark: str, look: Callable[..., _Found], *key: Any) -> _Found:
    """What ``look`` finds. All layers get the same mask, so it is kept with the mask until that is written to.

    Args:
        mask: has it as an attribute.
        mark: the name of the attribute.
        look: looks at the mask. Gives no tensor, which :func:`made` does.
        key: its other arguments.
    """
    answers = getattr(_inside, "told", None)
    if answers is not None:
        known: Look | None = next(answers, None)
        if known is None or known.arguments != (mark, look, *key):
            raise RuntimeError("attention looks at a mask that is no argument of the layer")
        return known.found  # type: ignore[no-any-return]
    found = made(mask, mark, look, *key)
    tensors, looks = getattr(_inside, "noted", None) or ((), list[Look]())
    looks.extend(Look(place, (mark, look, *key), found) for place, one in enumerate(tensors) if one is mask)
    return found


def made(mask: Any, mark: str, make: Callable[..., _Found], *key: Any) -> _Found:
    """What ``make`` makes of a mask, kept in the same way."""
    if mask.is_inference():  # it has no version
        return make(mask, *key)
    kept, version = getattr(mask, mark, None), (mask._version, *key)
    if kept is None or kept[0] != version:
        kept = version, make(mask, *key)
        setattr(mask, mark, kept)
    found: _Found = kept[1]
    return found
