"""Reading the values of a mask where attention is computed: whether that is possible, and once for all layers.

A CUDA graph cannot read values. So what a layer reads in a mask is recorded before the capture, and replayed during it
(:func:`record_reads`, :func:`replay_reads`). The graph then serves masks in which the layer would read the same.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from gemma4_compat._engine.runtime import in_place
from gemma4_compat._gemma4.cache import prefill
from gemma4_compat._gemma4.state import contents

_Found = TypeVar("_Found")

#: Per thread: ``recorded``, the tensors to watch and the list of their reads; ``replayed``, the reads to answer from.
_inside = threading.local()


@dataclass
class MaskRead:
    """What a layer has read in one of the tensors of its call.

    Attributes:
        place: which of the tensors it is.
        arguments: those of :func:`once`, without the mask.
        found: what :func:`once` returned. The kernels that are launched depend on it.
    """

    place: int
    arguments: tuple[Any, ...]
    found: Any

    def finds_the_same(self, tensors: Sequence[Any]) -> bool:
        """Whether these tensors of another call give the same."""
        return bool(once(tensors[self.place], *self.arguments) == self.found)


@contextlib.contextmanager
def record_reads(tensors: Sequence[Any]) -> Iterator[list[MaskRead]]:
    """Inside, this thread records what :func:`once` returns for the masks among ``tensors``."""
    found: list[MaskRead] = []
    with in_place.here(_inside, recorded=(tensors, found)):
        yield found


def replay_reads(reads: Sequence[MaskRead]) -> contextlib.AbstractContextManager[None]:
    """Inside, :func:`once` returns what these reads returned, in their order, and reads nothing."""
    return in_place.here(_inside, replayed=iter(reads))


def is_real(tensor: Any) -> bool:
    """Whether it has values, and no subclass makes something else of it."""
    import torch

    return type(tensor) is torch.Tensor and not tensor.is_meta


def is_traced(tensor: Any) -> bool:
    """Whether something records what is computed, and reading the mask would disturb it. A capture is
    no obstacle inside :func:`replay_reads`.
    """
    import torch

    return (
        torch.jit.is_tracing()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or prefill.is_captured()
        or (tensor.is_cuda and not hasattr(_inside, "replayed") and torch.cuda.is_current_stream_capturing())
    )


def once(mask: Any, mark: str, look: Callable[..., _Found], *key: Any) -> _Found:
    """What ``look`` finds. All layers get the same mask, so it is kept with the mask until that is written to.

    Args:
        mask: has it as an attribute.
        mark: the name of the attribute.
        look: reads the mask; called with it and ``key``. What it returns is compared, so no tensor: see :func:`made`.
        key: its other arguments.

    Raises:
        RuntimeError: inside :func:`replay_reads`, the layer reads something else than it did before.
    """
    answers = getattr(_inside, "replayed", None)
    if answers is not None:
        known: MaskRead | None = next(answers, None)
        if known is None or known.arguments != (mark, look, *key):
            raise RuntimeError("attention reads a mask that is no argument of the layer")
        return known.found  # type: ignore[no-any-return]
    found = made(mask, mark, look, *key)
    tensors, reads = getattr(_inside, "recorded", None) or ((), list[MaskRead]())
    reads.extend(MaskRead(place, (mark, look, *key), found) for place, one in enumerate(tensors) if one is mask)
    return found


def made(mask: Any, mark: str, make: Callable[..., _Found], *key: Any) -> _Found:
    """What ``make`` computes from a mask, kept in the same way. It may be a tensor."""
    if mask.is_inference():  # it has no version
        return make(mask, *key)
    kept, version = getattr(mask, mark, None), (contents.stamp(mask), *key)
    if kept is None or kept[0] != version:
        kept = version, make(mask, *key)
        setattr(mask, mark, kept)
    found: _Found = kept[1]
    return found
