"""What the graphs of a model keep, for plans: layers are captured on tensors without memory, and that is counted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from gemma4_compat._training import fast
from gemma4_compat._training.captured import layers

_Result = TypeVar("_Result")


class Kept(NamedTuple):
    """What graphs keep.

    Attributes:
        pool: memory in which one at a time computes.
        buffers: that they read and write.
        captured: how many kinds of layers have them.
        reasons: why others have none.
    """

    pool: int = 0
    buffers: int = 0
    captured: int = 0
    reasons: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Both."""
        return self.pool + self.buffers


def kept(model: Any, step: Callable[[], Any], counter: Any) -> Kept:
    """Run the forward of a step, and capture each decoder layer in it.

    Args:
        model: on the CPU; its tensors need no memory.
        step: runs it.
        counter: has ``now``, the bytes of living tensors, and ``reset_peak``, which returns the most since it was
            called before.
    """
    found = layers.decoder_layers(model)
    counted = _Counted(found, counter)
    for layer in found:
        fast.attach(layer, counted)
    step()
    return counted.kept()


class _Counted(layers.Training):
    """Captures one layer of each kind, and runs all as before. Others of a kind read and write the same memory."""

    def __init__(self, found: list[Any], counter: Any) -> None:
        pool: Any = _Pool(counter)
        super().__init__(found, math.inf, {"cpu": pool}, capture_at=1)
        self._pool, self._kinds = pool, set[Any]()
        self._look()

    def forward(self, layer: Any, below: Callable[..., Any], given: Any, named: dict[str, Any]) -> Any:
        call = self._call(layer, below, given, named)
        if call is not None:
            weights = tuple([(one.shape, one.dtype, one.requires_grad) for one in layer.parameters()])
            attention = layer.self_attn
            stores = getattr(attention, "store_full_length_kv", None)
            kind = call.signature, weights, getattr(attention, "is_sliding", None), stores
            if kind not in self._kinds and not self._calls[call.place].refuses(call):
                self._kinds.add(kind)
                self._calls[call.place].run(call)
        return below(*given, **named)

    def reason(self, text: str) -> None:
        """Keep why layers have no graph."""
        self.statistics.add_reason(text)

    def kept(self) -> Kept:
        """What all graphs keep."""
        buffers = sum(memory.nbytes for memory in self._memory.values())
        return Kept(self._pool.peak, buffers, self.statistics.captured, self.statistics.reasons)


class _Pool:
    """The pool of all graphs. It is its own recorder: it records nothing, and counts what a graph needs at once."""

    def __init__(self, counter: Any) -> None:
        self._counter, self.peak = counter, 0

    def __call__(self, _device: Any, _pool: Any) -> _Pool:
        return self

    def new_pool(self) -> None:
        """Graphs run one after another, so all share this one."""

    def replay(self) -> None:
        """Nothing: nobody reads what a replay gives."""

    def capture(self, run: Callable[[], _Result]) -> _Result:
        """Run it, and note the most memory that it takes."""
        before = self._counter.now
        self._counter.reset_peak()
        result = run()
        self.peak = max(self.peak, self._counter.reset_peak() - before)
        return result
