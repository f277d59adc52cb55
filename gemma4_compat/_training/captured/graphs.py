"""Both graphs of a decoder layer for calls of one kind, and the autograd function that replays them."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from gemma4_compat._engine.io.bits import same_bits
from gemma4_compat._gemma4.attention import tracing
from gemma4_compat._gemma4.state import contents
from gemma4_compat._graphs.fused_steps import Within
from gemma4_compat._graphs.recording import Recording, capturing
from gemma4_compat._training import modules
from gemma4_compat._training.captured.fusing import Fusing, Pass

_PLAIN = (bool, int, float, str)
#: Held while a graph's inputs are filled, it is launched, and its results are copied: layers share this memory.
_launching = threading.Lock()


class UnknownArgumentError(Exception):
    """An argument that is neither a tensor nor a plain value."""


class _Place:
    """Where a tensor is, in what has none."""


_PLACE = _Place()


class Buffer:
    """Memory that graphs of several layers read or write."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self._source: Callable[[], Any] = _nothing
        self._stamp: tuple[Any, ...] = ()

    def fill(self, source: Any) -> None:
        """Copy a tensor, unless it is the one that was copied last, and unchanged: masks and positions."""
        stamp = contents.stamp(source)
        if self._source() is not source or self._stamp != stamp:
            self.tensor.copy_(source.detach())
            self._source, self._stamp = weakref.ref(source), stamp


def _nothing(*_: Any) -> None:
    return None


class Memory:
    """What the graphs of a model share: a pool, and buffers by their role and layout.

    Args:
        device: of the layers.
        recorder: records graphs there.
    """

    def __init__(self, device: Any, recorder: type[Recording]) -> None:
        self.device, self.recorder = device, recorder
        self.pool = self.recorder.new_pool()
        self._weights: Any = None
        self._buffers: dict[Any, Buffer] = {}

    def like(self, role: Any, tensor: Any) -> Buffer:
        """The buffer for tensors of this layout in this role."""
        import torch

        strides = tensor.contiguous().stride() if 0 in tensor.stride() else tensor.stride()
        key = role, tensor.shape, strides, tensor.dtype
        if key not in self._buffers:
            with torch.inference_mode(False):
                made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
            self._buffers[key] = Buffer(made)
        return self._buffers[key]

    def weights(self, nbytes: int) -> Any:
        """Where graphs find the weights of a streamed layer: bytes, the same for all layers."""
        import torch

        if self._weights is None or self._weights.nbytes < nbytes:
            with torch.inference_mode(False):
                self._weights = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return self._weights

    @property
    def nbytes(self) -> int:
        """The bytes of all buffers, without weights."""
        return sum(buffer.tensor.nbytes for buffer in self._buffers.values())


@contextlib.contextmanager
def _without_filling() -> Iterator[None]:
    """Inside, new memory is not filled with NaN, as deterministic algorithms have it: all of it is written here."""
    import torch

    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = before


#: ``calls.LayerCall.run``.
Run = Callable[[Sequence[Any]], Any]


class Forward(NamedTuple):
    """A layer's forward with its autograd graph.

    Attributes:
        inputs: the call's tensors, as leaves of the graph.
        outputs: the tensors that the layer returns, then those that it hands on to later layers or gives to a cache.
        returned: how many it returns.
        read: the same number and that of those that it hands on.
        form: all of that without tensors.
    """

    inputs: list[Any]
    outputs: list[Any]
    returned: int
    read: int
    form: Any

    @classmethod
    def of(cls, call: Run, inputs: list[Any], autocast: Any) -> Forward:
        """Run a layer.

        Args:
            call: calls it.
            inputs: the call's tensors, as leaves.
            autocast: the ``torch.dtype`` of autocast; None without.
        """
        with _as_in_a_step(inputs[0].device.type, autocast):
            found = call(inputs)
        returned, read = (len(list(contents.tensors_in(part))) for part in (found[0], found[:2]))
        return cls(inputs, list(contents.tensors_in(found)), returned, read, without_tensors(found))

    def gradients(self, incoming: Sequence[Any], weights: Sequence[Any], *, recorded: bool = False) -> list[Any]:
        """Backpropagate these gradients of the outputs: gradients of the inputs, then of the weights, or None.

        ``recorded``: they can be differentiated in turn.
        """
        import torch

        leaves = [*self.inputs, *weights]
        given = [pair for pair in zip(self.outputs, incoming) if pair[0].requires_grad and pair[1] is not None]
        if not given:
            return [None] * len(leaves)
        outputs, gradients = [one for one, _ in given], [gradient for _, gradient in given]
        with torch.autocast(leaves[0].device.type, enabled=False):
            asked = [one for one in leaves if one.requires_grad]
            found = iter(torch.autograd.grad(outputs, asked, gradients, allow_unused=True, create_graph=recorded))
        return [next(found) if one.requires_grad else None for one in leaves]


class Graph:
    """Captures a layer's forward, and its backward pass after the same forward.

    Args:
        run: calls the layer.
        layer: that it calls.
        tensors: of a call of this kind.
        weights: those of the layer that are trained.
        memory: of all layers.
        role: of the inputs. Layers of one role have the same masks and positions.
        signature: of the calls that it serves.
        bring: copies the layer's weights to where the graphs find them; does nothing if they stay there.
        is_read: whether a later layer reads what this one hands on.
        fusing: of the model.

    Attributes:
        reads: what the layer has found in masks. The graph serves calls in whose masks it finds the same.
        form: of a :class:`Forward`.
        differentiable: which of the tensors in it require gradients.
        expected: which of them get one where the backward pass is replayed.

    Raises:
        Exception: something cannot be recorded, or memory is short. Nothing has changed.
    """

    def __init__(
        self,
        run: Run,
        layer: Any,
        tensors: Sequence[Any],
        weights: Sequence[Any],
        memory: Memory,
        role: Any,
        signature: Any,
        bring: Callable[[], None] = _nothing,
        *,
        is_read: bool,
        fusing: Fusing,
    ) -> None:
        import torch

        self._bring = bring
        bring()
        self.signature, self.addresses = signature, None  # it reads and writes no memory of the call's
        kind = memory.device.type
        self._autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self._asked = [tensor.requires_grad for tensor in tensors]
        leaves = self._leaves(tensors)
        with tracing.record_reads(leaves) as self.reads:
            tried = Forward.of(run, leaves, self._autocast)
        self.form, self.differentiable = tried.form, [one.requires_grad for one in tried.outputs]
        self.expected = [
            wanted and index < (tried.read if is_read else tried.returned)
            for index, wanted in enumerate(self.differentiable)
        ]
        incoming = [one.detach() if wanted else None for one, wanted in zip(tried.outputs, self.expected)]
        found = tried.gradients(incoming, weights)
        self._inputs = [memory.like((role, index), one) for index, one in enumerate(tensors)]
        self._outputs = [memory.like(("output", index), one) for index, one in enumerate(tried.outputs)]
        self._incoming = [memory.like(("incoming", index), one) for index, one in enumerate(tried.outputs)]
        self._gradients = [
            None if one is None else memory.like(("gradient", index), one) for index, one in enumerate(found)
        ]
        right = [one.detach() for one in tried.outputs], [one for one in found if one is not None]
        del tried, found, leaves
        self._memory, self._fusing = memory, fusing
        self._forward, self._backward = (
            fusing.captured(memory.device, one, functools.partial(self._has_the_bits, tensors, incoming, one, bits))
            for one, bits in zip(self._passes(run, layer, weights), right)
        )

    def _has_the_bits(
        self, tensors: Sequence[Any], incoming: Sequence[Any], one: Pass, right: Sequence[Any], recording: Recording
    ) -> bool:
        with _launching, _without_filling():
            self._fill(tensors, incoming)
            recording.replay()
            return all(map(same_bits, one.written, right))

    def _passes(self, run: Run, layer: Any, weights: Sequence[Any]) -> tuple[Pass, Pass]:
        """Forward and backward."""
        forward = functools.partial(self._captured, functools.partial(self._run_forward, run))
        backward = functools.partial(self._captured, functools.partial(self._run_backward, run, layer, weights))
        outputs, gradients = (
            [one.tensor for one in several if one is not None] for several in (self._outputs, self._gradients)
        )
        return Pass(forward, outputs, layer, weights), Pass(backward, gradients, layer, weights)

    def _captured(self, run: Callable[[], None], within: Within) -> Recording:
        def run_within() -> None:
            with within():
                run()

        recording = self._memory.recorder(self._memory.device, self._memory.pool)
        with capturing.held(), _without_filling():
            recording.capture(run_within)
        return recording

    @property
    def is_settled(self) -> bool:
        """Whether both passes are fused, or stay as they are."""
        return self._forward.is_settled and self._backward.is_settled

    def fuse(self, run: Run, layer: Any, weights: Sequence[Any]) -> None:
        """Have both passes of the layer captured again with fused kernels, unless these are still being compiled."""
        both = self._forward, self._backward
        self._fusing.attempt(self._memory.device, [*zip(both, self._passes(run, layer, weights))])

    def _leaves(self, tensors: Sequence[Any]) -> list[Any]:
        return [tensor.detach().requires_grad_(wanted) for tensor, wanted in zip(tensors, self._asked)]

    def _again(self, run: Run) -> Forward:
        with tracing.replay_reads(self.reads):
            return Forward.of(run, self._leaves([buffer.tensor for buffer in self._inputs]), self._autocast)

    def _run_forward(self, run: Run) -> None:
        """It keeps nothing for a backward pass."""
        import torch

        with torch.autograd.graph.saved_tensors_hooks(_nothing, _nothing):
            outputs = self._again(run).outputs
        for buffer, one in zip(self._outputs, outputs):
            buffer.tensor.copy_(one.detach())

    def _run_backward(self, run: Run, layer: Any, weights: Sequence[Any]) -> None:
        """With views: a loss of the last step, while it is kept, keeps weights on the stream of that step."""
        incoming = [buffer.tensor if wanted else None for buffer, wanted in zip(self._incoming, self.expected)]
        with modules.as_views(layer, weights) as views:
            found = self._again(run).gradients(incoming, views)
        for buffer, one in zip(self._gradients, found):
            if buffer is not None:
                buffer.tensor.copy_(one)

    def outputs(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """Those of the layer, for these tensors of a call."""
        with _launching, _without_filling():
            self._fill(tensors)
            self._forward.replay()
            return tuple([buffer.tensor.clone() for buffer in self._outputs])

    def gradients(self, tensors: Sequence[Any], incoming: Sequence[Any]) -> list[Any]:
        """Those of the tensors of a call and of the weights, for these gradients of the outputs."""
        with _launching, _without_filling():
            self._fill(tensors, incoming)
            self._backward.replay()
            return [None if buffer is None else buffer.tensor.clone() for buffer in self._gradients]

    def gradients_without(
        self, run: Run, tensors: Sequence[Any], incoming: Sequence[Any], weights: Sequence[Any]
    ) -> list[Any]:
        """The same without a graph, also where an output has no gradient."""
        return Forward.of(run, self._leaves(tensors), self._autocast).gradients(incoming, weights)

    def recorded_gradients(
        self, run: Run, layer: Any, tensors: Sequence[Any], incoming: Sequence[Any], weights: Sequence[Any]
    ) -> list[Any]:
        """The same, to be differentiated in turn: they depend on the tensors and weights as upstream's do."""
        inputs = [tensor.view_as(tensor) for tensor in tensors]
        with modules.as_views(layer, weights) as views:
            return Forward.of(run, inputs, self._autocast).gradients(incoming, views, recorded=True)

    def _fill(self, tensors: Sequence[Any], incoming: Sequence[Any] = ()) -> None:
        self._bring()
        for buffer, tensor in zip(self._inputs, tensors):
            buffer.fill(tensor)
        for buffer, gradient in zip(self._incoming, incoming):
            if gradient is not None:
                buffer.tensor.copy_(gradient)


@functools.cache
def replayed() -> Any:
    """The autograd function of a replay."""
    import torch

    class Replayed(torch.autograd.Function):  # type: ignore[misc]
        """(a ``calls.LayerCall``, how many tensors, its tensors, trained weights) -> the layer's outputs."""

        @staticmethod
        def forward(ctx: Any, call: Any, tensors: int, *given: Any) -> Any:
            ctx.call = call
            ctx.save_for_backward(*given[:tensors])
            found = call.graph.outputs(given[:tensors])
            differentiable = call.graph.differentiable
            ctx.mark_non_differentiable(*[one for one, wanted in zip(found, differentiable) if not wanted])
            ctx.set_materialize_grads(False)
            return found

        @staticmethod
        def backward(ctx: Any, *incoming: Any) -> Any:
            return None, None, *ctx.call.gradients(ctx.saved_tensors, incoming)

    return Replayed


@contextlib.contextmanager
def _as_in_a_step(kind: str, autocast: Any) -> Iterator[None]:
    """Gradients are recorded, and autocast casts each weight again."""
    import torch

    with (
        torch.enable_grad(),
        torch.autocast(kind, dtype=autocast, enabled=autocast is not None, cache_enabled=False),
    ):
        yield


def without_tensors(value: Any) -> Any:
    """The same with a mark in the place of each tensor.

    Raises:
        UnknownArgumentError: it contains something else than these, plain values and None.
    """
    import torch

    if isinstance(value, torch.Tensor):
        return _PLACE
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, dict):
        return {name: without_tensors(part) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple([without_tensors(part) for part in value])
    raise UnknownArgumentError(f"decoder layers get a {type(value).__name__}, which is neither a tensor nor a value")


def with_tensors(value: Any, tensors: Iterator[Any]) -> Any:
    """The same with the next tensor in the place of each mark."""
    if value is _PLACE:
        return next(tensors)
    if isinstance(value, dict):
        return {name: with_tensors(part, tensors) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple([with_tensors(part, tensors) for part in value])
    return value
