"""One call of a decoder layer: its tensors apart from everything else, and how it is captured and replayed."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from gemma4_compat._engine.runtime import in_place
from gemma4_compat._gemma4.attention import flash
from gemma4_compat._gemma4.cache import cache_names, shared_kv
from gemma4_compat._gemma4.state import checkpointing, contents
from gemma4_compat._graphs import signatures
from gemma4_compat._graphs.captured_calls import Call, Known
from gemma4_compat._offload.transfer import streaming
from gemma4_compat._training.captured import graphs

#: Kinds that are captured for one layer. No other one is captured then.
MAX_KINDS = 4
#: Arguments of the loss that reach the layers, which do not read them. Their values differ from step to step.
_OF_THE_LOSS = ("num_items_in_batch",)
#: What collators add for flash kernels, and no other attention reads: it differs with the texts in a row.
_OF_FLASH = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
#: Layers of a dynamic cache. An empty one returns the keys and values that it gets.
_GROWING = ("DynamicLayer", "DynamicSlidingWindowLayer")
_REMEDY = "pass use_cache=False to the model, as training needs no cache"


class LayerCall(Call):
    """A call of a decoder layer. Autograd holds it until its backward pass.

    Args:
        training: of its model, a ``layers.Training``.
        place: of the layer.
        layer: itself.
        below: its forward.
        given: positional arguments.
        named: the others.

    Attributes:
        tensors: all tensors among the arguments, and the keys and values of earlier layers if this one reads them.
            Tensors that were made in inference mode are copied: autograd keeps none of them, and nothing counts what
            is written to them.
        group: the layer's weights, if it is streamed; or None.

    Raises:
        UnknownArgumentError: an argument can be neither compared nor copied.
    """

    addresses = ()
    refused_as = "layer"  # if one call of a layer cannot be captured, no other is tried

    def __init__(
        self, training: Any, place: int, layer: Any, below: Callable[..., Any], given: Any, named: dict[str, Any]
    ) -> None:
        self._training, self.place, self._layer, self._below = training, place, layer, below
        self.group = streaming.group_of(layer)
        self._shared: Any = named.get(shared_kv.NAME)  # where layers hand on keys and values
        reads = getattr(layer.self_attn, "is_kv_shared_layer", False)
        plain = layer.self_attn.config._attn_implementation in flash.PLAIN
        unread = (shared_kv.NAME, *_OF_THE_LOSS, *(_OF_FLASH if plain else ()))
        others = {name: value for name, value in named.items() if name not in unread}
        name = next((name for name in cache_names.NAMES if others.get(name) is not None), None)
        self._cache = None if name is None else _written(layer, others[name])
        if name is not None:
            others[name] = None
        self._written = None if self._cache is None else name
        arguments = (tuple(given), others, dict(self._shared) if self._shared is not None and reads else {})
        self.tensors = [one.clone() if one.is_inference() else one for one in contents.tensors_in(arguments)]
        self._arguments = graphs.without_tensors(arguments)
        self._shared_type = None if self._shared is None else type(self._shared)
        self.device = self.tensors[0].device if self.tensors else None
        self.signature = (
            repr(self._arguments),
            self._shared_type,
            self._written,
            tuple(map(_layout, self.tensors)),
            *_autocast(),
            *signatures.settings(),
            _stream(self.device),
        )

    def run(self, tensors: Sequence[Any]) -> tuple[Any, dict[Any, Any], tuple[Any, ...]]:
        """Call the layer without checkpointing, with tensors in the places of the call's.

        Returns:
            what the layer returns, what it adds for later layers, and the keys and values that it gives to a cache.
        """
        given, named, read = graphs.with_tensors(self._arguments, iter(tensors))
        shared = None
        if self._shared_type is not None:
            named[shared_kv.NAME] = shared = self._shared_type(dict(read))
        cache = _Empty()
        if self._written is not None:
            named[self._written] = cache
        with in_place.assigned(self._layer, checkpointing.FLAG, False):
            found = self._below(*given, **named)
        added = {} if shared is None else dict(shared)
        return found, {name: value for name, value in added.items() if not _same(value, read.get(name))}, cache.given

    def is_served_by(self, graph: Any) -> bool:
        """Whether the layer finds the same in its masks."""
        return all(read.finds_the_same(self.tensors) for read in graph.reads)

    def has_room(self, known: Known) -> bool:
        """A few are captured, and none of them makes room for another."""
        if len(known.graphs) < MAX_KINDS:
            return True
        same = any(graph.signature == self.signature for graph in known.graphs)
        what = "layouts of masks" if same else "shapes of batches"
        self._training.reason(f"{MAX_KINDS} {what} are captured; pad to a few lengths (pad_to_multiple_of)")
        return False

    def capture(self, pool: Any) -> graphs.Graph:
        """Record its forward and backward pass, in the memory of all layers."""
        memory, weights = self._training.memory(self), self._training.weights[self.place]
        role, is_read = getattr(self._layer.self_attn, "is_sliding", None), self._training.is_read
        given: list[Any] = [self.run, self._layer, self.tensors, weights, memory, role, self.signature]
        if self.group is not None:
            given.append(functools.partial(self.group.copy_to, memory.weights(self.group.nbytes)))
        with self._computing(memory):
            return graphs.Graph(*given, is_read=is_read, fusing=self._training.fusing)

    def _computing(self, memory: graphs.Memory) -> contextlib.AbstractContextManager[Any]:
        """Inside, a streamed layer finds its weights where graphs do."""
        if self.group is None:
            return contextlib.nullcontext()
        return self.group.computing_in(memory.weights(self.group.nbytes))

    def was_captured(self, known: Known) -> None:
        """Other layouts of its masks are counted anew."""
        known.seen.pop(self.signature, None)

    def replay(self, graph: graphs.Graph, *, prepared: bool = False) -> Any:
        """What the layer returns; its backward pass is replayed as well. None if a layer of the model is gone."""
        state, weights = next(iter(self._training.states), None), self._training.weights
        if state is None:
            return None
        self.graph, self._state, self._weights = graph, state, weights[self.place]
        if not graph.is_settled:
            with self._computing(self._training.memory(self)):
                graph.fuse(self.run, self._layer, self._weights)
        tensors, self.tensors = self.tensors, []  # autograd saves them, through any hooks on saved tensors
        outputs = graphs.replayed().apply(self, len(tensors), *tensors, *self._weights)
        found, handed_on, cached = graphs.with_tensors(graph.form, iter(outputs))
        if self._shared is not None:
            self._shared.update(handed_on)
        if self._cache is not None:
            self._cache.update(*cached, self._layer.self_attn.layer_idx)
        self._shared = self._cache = None
        return found

    def gradients(self, tensors: Sequence[Any], incoming: Sequence[Any]) -> list[Any]:
        """After a replay, those of these tensors and of the weights, for these gradients of the outputs."""
        import torch

        if self.group is not None:
            self.group.require_in_backward()
        if torch.is_grad_enabled():
            self._training.reason("create_graph=True asks for gradients of gradients, which graphs do not have")
            return self.graph.recorded_gradients(self.run, self._layer, tensors, incoming, self._weights)
        given = [gradient is not None for gradient in incoming]
        if given == self.graph.expected and self._state.guards.check_weights():
            return self.graph.gradients(tensors, incoming)
        return self.graph.gradients_without(self.run, tensors, incoming, self._weights)

    def note(self, reason: str | BaseException) -> None:
        """In the statistics and the log."""
        first, *_ = str(reason).split("\n")
        self._training.reason(f"a layer cannot be captured: {type(reason).__name__}: {first}")


class _Empty:
    """Stands in for a layer's part of an empty dynamic cache, and notes what it gets.

    Attributes:
        given: keys and values.
    """

    def __init__(self) -> None:
        self.given: tuple[Any, ...] = ()

    def update(self, keys: Any, values: Any, *_args: Any, **_named: Any) -> tuple[Any, Any]:
        """What an empty layer returns: the same, contiguous."""
        import torch

        self.given = keys, values
        found = [torch.cat((one.new_empty(0), one), dim=-2) for one in self.given]
        return found[0], found[1]


def _written(layer: Any, cache: Any) -> Any:
    """The cache if the layer writes to it: an empty dynamic one. None if the layer does not touch it.

    Raises:
        UnknownArgumentError: the layer may read what it holds.
    """
    if getattr(layer, checkpointing.FLAG, False):
        return None  # checkpointed layers get none
    attention = layer.self_attn
    reads = getattr(attention, "is_kv_shared_layer", False)
    shares = reads or getattr(attention, "store_full_length_kv", False)
    if shares and shared_kv.NAME not in inspect.signature(type(attention).forward).parameters:  # before 5.5.2
        raise graphs.UnknownArgumentError(f"layers share keys and values through the cache; {_REMEDY}")
    if reads:
        return None
    if type(cache).__name__ != "DynamicCache" or getattr(cache, "offloading", False):
        raise graphs.UnknownArgumentError(f"the model has a {type(cache).__name__}; {_REMEDY}")
    for part in cache.layers[attention.layer_idx : attention.layer_idx + 1]:
        if type(part).__name__ not in _GROWING or part.is_initialized:
            raise graphs.UnknownArgumentError(f"the cache holds tokens; {_REMEDY}")
    return cache


def _same(one: Any, other: Any) -> bool:
    """Whether these have the same tensors: accelerate's hooks rebuild what holds them."""
    return list(map(id, contents.tensors_in(one))) == list(map(id, contents.tensors_in(other)))


def _layout(tensor: Any) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _stream(device: Any) -> Any:
    import torch

    on_cuda = device is not None and device.type == "cuda"
    return torch.cuda.current_stream(device).cuda_stream if on_cuda else 0


def _autocast() -> list[Any]:
    """Its dtype on the host and on a GPU; None without."""
    import torch

    return [torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in ("cpu", "cuda")]
