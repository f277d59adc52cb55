"""One call of a decoder layer: its tensors apart from everything else, and the same call with other tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gemma4_compat._engine.runtime import in_place
from gemma4_compat._gemma4.cache import cache_names, shared_kv
from gemma4_compat._gemma4.state import checkpointing, contents
from gemma4_compat._graphs import captured_calls, signatures

#: Arguments of the loss that reach the layers, which do not read them. Their values differ from step to step.
_OF_THE_LOSS = ("num_items_in_batch",)
_PLAIN = (bool, int, float, str)
#: Layers of a dynamic cache. An empty one returns the keys and values that it gets.
_GROWING = ("DynamicLayer", "DynamicSlidingWindowLayer")
_REMEDY = "pass use_cache=False to the model, as training needs no cache"


class UnknownArgumentError(Exception):
    """An argument that is neither a tensor nor a plain value."""


class _Place:
    """Where a tensor is, in what has none."""


_PLACE = _Place()


class Call(captured_calls.Call):
    """A call of a decoder layer.

    Args:
        layer: the decoder layer.
        given: positional arguments.
        named: the others.

    Attributes:
        tensors: all tensors among the arguments, and the keys and values of earlier layers if this one reads them.
            Tensors that were made in inference mode are copied: autograd keeps none of them, and nothing counts what
            is written to them.
        shared: where layers hand on keys and values; None if none do.
        cache: an empty dynamic cache, which this layer writes into; None without one.
        form: the call without its tensors.

    Raises:
        UnknownArgumentError: an argument can be neither compared nor copied.
    """

    def __init__(self, layer: Any, given: Sequence[Any], named: dict[str, Any]) -> None:
        self.shared: Any = named.get(shared_kv.NAME)
        reads = getattr(layer.self_attn, "is_kv_shared_layer", False)
        others = {name: value for name, value in named.items() if name not in (shared_kv.NAME, *_OF_THE_LOSS)}
        name = next((name for name in cache_names.NAMES if others.get(name) is not None), None)
        self.cache = None if name is None else _written(layer, others[name])
        if name is not None:
            others[name] = None
        written = None if self.cache is None else name
        arguments = (tuple(given), others, dict(self.shared) if self.shared is not None and reads else {})
        self.tensors = [one.clone() if one.is_inference() else one for one in contents.tensors_in(arguments)]
        self.form = Form(None if self.shared is None else type(self.shared), without_tensors(arguments), written)
        self.device = self.tensors[0].device if self.tensors else None
        self.signature = (
            repr(self.form.arguments),
            self.form.shared,
            written,
            tuple(map(_layout, self.tensors)),
            *_autocast(),
            *signatures.settings(),
            _stream(self.device),
        )


class Form:
    """A call without its tensors.

    Args:
        shared: the type of what layers hand on; None if they hand on nothing.
        arguments: positional ones, the others by name, and what earlier layers have handed on.
        written: the name of an empty cache that the layer writes into; None without one.
    """

    def __init__(self, shared: Any, arguments: Any, written: str | None = None) -> None:
        self.shared, self.arguments, self._written = shared, arguments, written

    def call(
        self, layer: Any, below: Callable[..., Any], tensors: Sequence[Any]
    ) -> tuple[Any, dict[Any, Any], tuple[Any, ...]]:
        """Call the layer without checkpointing.

        Args:
            layer: the decoder layer.
            below: its forward.
            tensors: in the places of the call's.

        Returns:
            what the layer returns, what it adds for later layers, and the keys and values that it gives to a cache.
        """
        given, named, read = with_tensors(self.arguments, iter(tensors))
        shared = None
        if self.shared is not None:
            named[shared_kv.NAME] = shared = self.shared(dict(read))
        cache = _Empty()
        if self._written is not None:
            named[self._written] = cache
        with in_place.assigned(layer, checkpointing.FLAG, False):
            found = below(*given, **named)
        added = {} if shared is None else dict(shared)
        return found, {name: value for name, value in added.items() if value is not read.get(name)}, cache.given


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
    """The cache, if the layer writes into it; None if it leaves it alone.

    Raises:
        UnknownArgumentError: the layer may read what it holds.
    """
    if getattr(layer, checkpointing.FLAG, False):
        return None  # checkpointed layers get none
    attention = layer.self_attn
    reads = getattr(attention, "is_kv_shared_layer", False)
    shares = reads or getattr(attention, "store_full_length_kv", False)
    if shares and shared_kv.NAME not in inspect.signature(type(attention).forward).parameters:  # before 5.5.2
        raise UnknownArgumentError(f"layers share keys and values through the cache; {_REMEDY}")
    if reads:
        return None
    if type(cache).__name__ != "DynamicCache" or getattr(cache, "offloading", False):
        raise UnknownArgumentError(f"the model has a {type(cache).__name__}; {_REMEDY}")
    for part in cache.layers[attention.layer_idx : attention.layer_idx + 1]:
        if type(part).__name__ not in _GROWING or part.is_initialized:
            raise UnknownArgumentError(f"the cache holds tokens; {_REMEDY}")
    return cache


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
