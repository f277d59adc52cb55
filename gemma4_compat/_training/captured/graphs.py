"""Both graphs of a decoder layer for calls of one kind, and the autograd function that replays them."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gemma4_compat._gemma4.attention import tracing
from gemma4_compat._gemma4.state import contents
from gemma4_compat._graphs.recording import Recording, capturing
from gemma4_compat._training import whole
from gemma4_compat._training.captured import calls

#: Held while a graph's inputs are filled, it is launched, and its results are copied: layers share this memory.
_launching = threading.Lock()


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


def _nothing() -> None:
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

    @property
    def nbytes(self) -> int:
        """The bytes of all buffers."""
        return sum(buffer.tensor.nbytes for buffer in self._buffers.values())


#: Calls a layer with tensors in the places of the call's: what it returns, what it hands on to later layers, and what
#: it gives to a cache.
Run = Callable[[Sequence[Any]], Any]


class Step(NamedTuple):
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
    def of(cls, call: Run, inputs: list[Any], autocast: Any) -> Step:
        """Run a layer.

        Args:
            call: calls it.
            inputs: the call's tensors, as leaves.
            autocast: the ``torch.dtype`` of autocast; None without.
        """
        with _as_in_a_step(inputs[0].device.type, autocast):
            found = call(inputs)
        returned, read = (len(list(contents.tensors_in(part))) for part in (found[0], found[:2]))
        return cls(inputs, list(contents.tensors_in(found)), returned, read, calls.without_tensors(found))

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
        tensors: of a call of this kind.
        weights: those of the layer that are trained.
        memory: of all layers.
        role: of the inputs. Layers of one role have the same masks and positions.
        is_read: whether a later layer reads what this one hands on.

    Attributes:
        reads: what the layer has found in masks. The graph serves calls in whose masks it finds the same.
        form: of a :class:`Step`.
        differentiable: which of the tensors in it require gradients.
        expected: which of them get one where the backward pass is replayed.
        signature: of the calls that it serves.

    Raises:
        Exception: something cannot be recorded, or memory is short. Nothing has changed.
    """

    def __init__(
        self,
        run: Run,
        tensors: Sequence[Any],
        weights: Sequence[Any],
        memory: Memory,
        role: Any,
        *,
        is_read: bool,
    ) -> None:
        import torch

        self.signature = self.addresses = None  # it reads and writes no memory of the call's
        kind = memory.device.type
        self._autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self._asked = [tensor.requires_grad for tensor in tensors]
        leaves = self._leaves(tensors)
        with tracing.record_reads(leaves) as self.reads:
            tried = Step.of(run, leaves, self._autocast)
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
        del tried, found, leaves
        self._forward, self._backward = (memory.recorder(memory.device, memory.pool) for _ in range(2))
        with capturing.held():
            self._forward.capture(functools.partial(self._run_forward, run))
            self._backward.capture(functools.partial(self._run_backward, run, weights))

    def _leaves(self, tensors: Sequence[Any]) -> list[Any]:
        return [tensor.detach().requires_grad_(wanted) for tensor, wanted in zip(tensors, self._asked)]

    def _step(self, run: Run) -> Step:
        with tracing.replay_reads(self.reads):
            return Step.of(run, self._leaves([buffer.tensor for buffer in self._inputs]), self._autocast)

    def _run_forward(self, run: Run) -> None:
        step = self._step(run)
        for buffer, one in zip(self._outputs, step.outputs):
            buffer.tensor.copy_(one.detach())

    def _run_backward(self, run: Run, weights: Sequence[Any]) -> None:
        step = self._step(run)
        incoming = [buffer.tensor if wanted else None for buffer, wanted in zip(self._incoming, self.expected)]
        found = step.gradients(incoming, weights)
        for buffer, one in zip(self._gradients, found):
            if buffer is not None:
                buffer.tensor.copy_(one)

    def outputs(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """Those of the layer, for these tensors of a call."""
        with _launching:
            self._fill(tensors)
            self._forward.replay()
            return tuple([buffer.tensor.clone() for buffer in self._outputs])

    def gradients(self, tensors: Sequence[Any], incoming: Sequence[Any]) -> list[Any]:
        """Those of the tensors of a call and of the weights, for these gradients of the outputs."""
        with _launching:
            self._fill(tensors)
            for buffer, gradient in zip(self._incoming, incoming):
                if gradient is not None:
                    buffer.tensor.copy_(gradient)
            self._backward.replay()
            return [None if buffer is None else buffer.tensor.clone() for buffer in self._gradients]

    def gradients_without(
        self, run: Run, tensors: Sequence[Any], incoming: Sequence[Any], weights: Sequence[Any]
    ) -> list[Any]:
        """The same without a graph, also where an output has no gradient."""
        return Step.of(run, self._leaves(tensors), self._autocast).gradients(incoming, weights)

    def recorded_gradients(
        self, run: Run, layer: Any, tensors: Sequence[Any], incoming: Sequence[Any], weights: Sequence[Any]
    ) -> list[Any]:
        """The same, to be differentiated in turn: they depend on the tensors and weights as upstream's do."""
        inputs = [tensor.view_as(tensor) for tensor in tensors]
        with whole.as_views(layer, weights) as views:
            step = Step.of(run, inputs, self._autocast)
            return step.gradients(incoming, views, recorded=True)

    def _fill(self, tensors: Sequence[Any]) -> None:
        for buffer, tensor in zip(self._inputs, tensors):
            buffer.fill(tensor)


@dataclass
class Replay:
    """One call of a layer that is replayed.

    Attributes:
        graph: of calls of this kind.
        run: calls the layer.
        tensors: of the call.
        weights: those that ``graph`` was made with.
        may_replay: asked in the backward pass: whether the layer is as it was.
        layer: itself.
        tell: called with a reason if its backward pass runs without a graph.
    """

    graph: Graph
    run: Run
    tensors: Sequence[Any]
    weights: Sequence[Any]
    may_replay: Callable[[], bool]
    layer: Any
    tell: Callable[[str], None]

    def outputs(self) -> Any:
        """Those of the layer. Their backward pass is replayed as well."""
        given, self.tensors = self.tensors, ()  # autograd saves them, through any hooks on saved tensors
        return _replayed().apply(self, len(given), *given, *self.weights)

    def gradients(self, tensors: Sequence[Any], incoming: Sequence[Any]) -> list[Any]:
        """Those of the tensors and weights, for these gradients of the outputs."""
        import torch

        if torch.is_grad_enabled():
            self.tell("create_graph=True asks for gradients of gradients, which graphs do not have")
            return self.graph.recorded_gradients(self.run, self.layer, tensors, incoming, self.weights)
        if [gradient is not None for gradient in incoming] == self.graph.expected and self.may_replay():
            return self.graph.gradients(tensors, incoming)
        return self.graph.gradients_without(self.run, tensors, incoming, self.weights)


@functools.cache
def _replayed() -> Any:
    import torch

    class Replayed(torch.autograd.Function):  # type: ignore[misc]
        """(a replay, how many tensors, the tensors of the call, trained weights) -> the layer's outputs."""

        @staticmethod
        def forward(ctx: Any, replay: Replay, tensors: int, *given: Any) -> Any:
            ctx.replay = replay
            ctx.save_for_backward(*given[:tensors])
            found = replay.graph.outputs(given[:tensors])
            differentiable = replay.graph.differentiable
            ctx.mark_non_differentiable(*[one for one, wanted in zip(found, differentiable) if not wanted])
            ctx.set_materialize_grads(False)
            return found

        @staticmethod
        def backward(ctx: Any, *incoming: Any) -> Any:
            return None, None, *ctx.replay.gradients(ctx.saved_tensors, incoming)

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
