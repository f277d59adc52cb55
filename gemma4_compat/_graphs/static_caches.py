"""The tensors of a static cache: graphs hold their addresses.

A layer is one of transformers' ``StaticLayer`` or ``StaticSlidingWindowLayer`` (5.5.0 to 5.23.0 at least). It has
``keys`` and ``values`` of shape [batch, heads, length, width]; ``cumulative_length``, an integer tensor on their
device; and, if it is sliding, ``cumulative_length_int``, which decides between two ways of an update.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from gemma4_compat._engine.io.bits import same_bits
from gemma4_compat._engine.runtime import in_place
from gemma4_compat._graphs import initializing


def is_static(cache: Any) -> bool:
    """Whether every layer of this cache is static and stays where it is."""
    layers = getattr(cache, "layers", None)
    if not layers or getattr(cache, "offloading", False):
        return False
    return all(type(layer).__name__ in _LAYERS for layer in layers) and bool(list(holding(cache)))


#: The last one stands for a layer that shares another layer's keys (5.23).
_LAYERS = ("StaticLayer", "StaticSlidingWindowLayer", "DummyLayer")


def holding(cache: Any) -> Iterator[Any]:
    """The layers that have keys of their own."""
    return (layer for layer in cache.layers if type(layer).__name__ != "DummyLayer")


def tensors(cache: Any) -> tuple[Any, ...] | None:
    """All tensors of a cache, in order; None before its first forward."""
    found: list[Any] = []
    for layer in holding(cache):
        if not layer.is_initialized:
            return None
        found += (layer.keys, layer.values, layer.cumulative_length)
    return tuple(found)


def length(cache: Any) -> int:
    """The positions of its longest layer."""
    return max(int(layer.max_cache_len) for layer in holding(cache))


def sliding(cache: Any) -> list[Any]:
    """The sliding layers, whose updates depend on a counter in Python."""
    return [layer for layer in holding(cache) if type(layer).__name__ == "StaticSlidingWindowLayer"]


def window_full(layer: Any) -> bool:
    """Whether a sliding layer drops a token for each one it gets: the second mode of its update."""
    return bool(layer.cumulative_length_int >= layer.max_cache_len)


def update_mode(layer: Any, tokens: int) -> tuple[str, int]:
    """How the update of a sliding layer by several tokens goes, and the number in Python that it reads then."""
    if window_full(layer):
        return "full", 0
    held = int(layer.cumulative_length_int)
    return ("fills", held) if held + tokens > layer.max_cache_len else ("fits", 0)


@contextlib.contextmanager
def capturable(cache: Any, tokens: int = 1) -> Iterator[None]:
    """Inside, an update does nothing that a capture refuses, and counters do not advance.

    Args:
        cache: its layers have their tensors.
        tokens: of each update.
    """
    counted = [(layer, layer.cumulative_length_int) for layer in sliding(cache)]
    try:
        with shifted(cache) if tokens == 1 else contextlib.nullcontext():
            yield
    finally:
        for layer, length in counted:
            layer.cumulative_length_int = length


@contextlib.contextmanager
def shifted(cache: Any) -> Iterator[None]:
    """Inside, an update of one token moves the rows of full sliding layers by :mod:`shifting`, with the same bits."""
    with overridden(list(filter(window_full, sliding(cache))), "update", _update_full):
        yield


@contextlib.contextmanager
def overridden(layers: list[Any], method: str, function: Callable[..., Any]) -> Iterator[None]:
    """Inside, ``function``, which also gets the layer, replaces that method of each of these layers."""
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(in_place.replaced(layer, method, functools.partial(function, layer)))
        yield


def _update_full(layer: Any, _below: Any, keys: Any, values: Any, *_args: Any, **_kwargs: Any) -> tuple[Any, Any]:
    """``StaticSlidingWindowLayer.update`` of a full layer, without the index that it copies from the host."""
    from gemma4_compat._kernels.match import custom

    new_keys, new_values = keys.to(layer.keys.dtype), values.to(layer.values.dtype)
    custom.operator("shift")(layer.keys, layer.values, new_keys, new_values, False)
    layer.cumulative_length_int += 1
    return layer.keys, layer.values


@contextlib.contextmanager
def updated_by(cache: Any, window: Any, real: Any, added: int) -> Iterator[None]:
    """Inside, an update takes tokens of which only the first are real, and reads how many from tensors.

    A sliding layer returns its old window and the new keys and values after it, and keeps a part of both.

    Args:
        cache: a static cache.
        window: integers of the length of a window: which of those it keeps.
        real: integer of no dimension: how many tokens are real.
        added: the same number.
    """
    slides = sliding(cache)
    others = [layer for layer in holding(cache) if not any(layer is other for other in slides)]
    with (
        overridden(slides, "update", functools.partial(_slide, window, real, added)),
        overridden(others, "update", functools.partial(_append, real)),
    ):
        yield


def _slide(
    window: Any, real: Any, added: int, layer: Any, _below: Any, keys: Any, values: Any, *_args: Any, **_kwargs: Any
) -> tuple[Any, Any]:
    import torch

    if not layer.is_initialized:
        layer.lazy_initialization(keys, values)
    found = []
    for held, new in ((layer.keys, keys), (layer.values, values)):
        found.append(torch.cat((held, new.to(held.dtype)), dim=-2))
        held.copy_(found[-1].index_select(-2, window))
    layer.cumulative_length.add_(real)
    layer.cumulative_length_int += added
    return found[0], found[1]


def _append(
    real: Any, layer: Any, _below: Any, keys: Any, values: Any, *_args: Any, **_kwargs: Any
) -> tuple[Any, Any]:
    import torch

    if not layer.is_initialized:
        layer.lazy_initialization(keys, values)
    # Padding beyond the end goes to the last slot, which is not in use: a prompt has a last token after all buckets.
    slots = (
        torch.arange(keys.shape[-2], device=keys.device)
        .add_(layer.cumulative_length)
        .clamp_(max=layer.keys.shape[-2] - 1)
    )
    for held, new in ((layer.keys, keys), (layer.values, values)):
        held.index_copy_(-2, slots, new.to(held.dtype))
    layer.cumulative_length.add_(real)
    return layer.keys, layer.values


def held(cache: Any) -> int | None:
    """How many tokens a cache holds; None if no sliding layer counts them, or if these differ."""
    counted = {(int(layer.cumulative_length_int), int(layer.max_cache_len)) for layer in sliding(cache)}
    return counted.pop()[0] if len(counted) == 1 else None


def empty(cache: Any) -> None:
    """Have a cache hold nothing, in the memory that it has."""
    for layer in holding(cache):
        if layer.is_initialized:
            layer.reset()


def window(cache: Any) -> int:
    """The positions of a sliding layer."""
    return int(sliding(cache)[0].max_cache_len)


def advance(layers: list[Any], tokens: int = 1) -> None:
    """Count the tokens that a replay added to these sliding layers."""
    for layer in layers:
        layer.cumulative_length_int += tokens


@contextlib.contextmanager
def reordered_in_place(cache: Any) -> Iterator[None]:
    """Inside, ``cache.reorder_cache`` (beams) writes into the existing tensors instead of replacing them."""
    with overridden(list(holding(cache)), "reorder_cache", _reorder):
        yield


def _reorder(layer: Any, _below: Any, beams: Any) -> None:
    if layer.is_initialized:
        for held in (layer.keys, layer.values):
            held.copy_(held.index_select(0, beams.to(held.device)))


def changed_by(cache: Any, tokens: int) -> list[Any]:
    """What a forward of so many tokens may change in a cache whose layers have their tensors, as views.

    For a sliding layer that is everything; for a full layer, its length and the keys and values from there on.
    """
    found: list[Any] = []
    for layer in holding(cache):
        keys, values = layer.keys, layer.values
        if type(layer).__name__ == "StaticLayer":
            at = max(min(int(layer.cumulative_length), keys.shape[2] - tokens), 0)
            keys, values = keys[:, :, at : at + tokens], values[:, :, at : at + tokens]
        found += (keys, values, layer.cumulative_length)
    return found


class Snapshot:
    """Tensors that a step may change, copied to the host.

    Args:
        views: of these tensors.
    """

    def __init__(self, views: list[Any]) -> None:
        self._views = views
        self._copies = self._copied()

    def _copied(self) -> list[Any]:
        return [view.to("cpu", copy=True) for view in self._views]

    def again(self) -> Snapshot:
        """The same tensors as they are now."""
        other = copy.copy(self)
        other._copies = self._copied()
        return other

    def restore(self) -> None:
        """Write the copy back."""
        for view, copied in zip(self._views, self._copies, strict=True):
            view.copy_(copied)

    def holds(self) -> bool:
        """Whether these tensors still have the bits that were copied."""
        pairs = zip(self._views, self._copies, strict=True)
        return all(same_bits(view, copied.to(view.device)) for view, copied in pairs)


class Held:
    """What a cache holds before a forward of several tokens, for the case that this runs out of memory.

    Full layers write only behind what they hold; the windows of sliding layers are copied to the host.

    Args:
        cache: static; all its sliding layers hold as many tokens (:func:`held`).
    """

    def __init__(self, cache: Any) -> None:
        self._cache, self._tokens = cache, held(cache) or 0
        layers = sliding(cache) if self._tokens else []
        windows = [(layer.keys, layer.values, layer.cumulative_length) for layer in layers]
        self._windows = Snapshot([part for parts in windows for part in parts])

    def restore(self) -> None:
        """Have the cache hold that again, and nothing behind it, in the memory that it has."""
        if not self._tokens:
            empty(self._cache)
            return
        self._windows.restore()
        for layer in holding(self._cache):
            if type(layer).__name__ == "StaticLayer":
                for part in (layer.keys, layer.values):
                    part[:, :, self._tokens :].zero_()
                layer.cumulative_length.fill_(self._tokens)
            else:
                layer.cumulative_length_int = self._tokens


class Memory:
    """The tensors of one cache, kept for the next cache of the same shapes.

    Since transformers 5.15 each ``generate`` has its own cache; a graph of the last one serves the next if that uses
    the same memory. Before, transformers kept the cache itself.

    Args:
        cache: its layers have their tensors.
    """

    def __init__(self, cache: Any) -> None:
        found = tensors(cache)
        assert found is not None
        self.tensors = found
        self.addresses = addresses(found)
        self.windows: Any = None  # a `draft_windows.Windows`, once texts were decoded in speculative steps
        self._cache = weakref.ref(cache)
        self._initialized: dict[int, initializing.Initialized | None] = {}  # by layer, once one took its tensors

    @property
    def in_use(self) -> bool:
        """Whether its cache is alive, or anything else holds one of its tensors."""
        return self._cache() is not None or _any_held(self.tensors)

    def is_of(self, cache: Any) -> bool:
        """Whether this is, or will be, the memory of that cache."""
        return self._cache() is cache

    def layout(self) -> tuple[Any, ...]:
        """Shapes and dtypes of the tensors."""
        return layout(self.tensors)

    def fill(self, cache: Any) -> tuple[Any, ...] | None:
        """Have the layers of a cache take the memory that was lent to it, before its first forward does.

        Returns:
            the tensors that the cache has now; None if that is not this memory.
        """
        layers = list(holding(cache))
        lent = [in_place.replacements(vars(layer).get("lazy_initialization")) for layer in layers]
        known = [self._initialized.get(index) for index in range(len(layers))]
        if all(each == [_initialize] for each in lent) and initializing.fill(layers, known, self.tensors):
            for layer in layers:
                in_place.restore(layer, "lazy_initialization", _initialize)
            return self.tensors
        for layer, keys, values in zip(layers, self.tensors[::3], self.tensors[1::3]):
            layer.lazy_initialization(keys[:, :, :0], values[:, :, :0])
        found = tensors(cache)
        return found if found is not None and addresses(found) == self.addresses else None

    def take_back(self, cache: Any, before: list[dict[str, Any]], on_refused: Callable[[Memory], None]) -> None:
        """Undo :meth:`fill`: the layers have no tensors, and this memory is lent to them.

        Args:
            cache: that was filled.
            before: what :func:`attributes` returned before.
            on_refused: as for :meth:`lend`.
        """
        for layer, attributes in zip(holding(cache), before):
            vars(layer).clear()
            vars(layer).update(attributes)
            vars(layer).pop("lazy_initialization", None)
        self.lend(cache, on_refused)

    def lend(self, cache: Any, on_refused: Callable[[Memory], None]) -> None:
        """Have the layers of a new cache use these tensors, zeroed, instead of new ones.

        Args:
            cache: no forward has filled it.
            on_refused: called with this memory if a layer gets keys that these tensors cannot hold.
        """
        layers = list(holding(cache))
        keys = self.tensors[::3]
        if len(layers) != len(keys) or any(layer.max_cache_len != held.shape[2] for layer, held in zip(layers, keys)):
            on_refused(self)
            return
        self._cache = weakref.ref(cache)
        for index, layer in enumerate(layers):
            own = self.tensors[3 * index : 3 * index + 3]
            note = functools.partial(self._initialized.__setitem__, index)
            given = functools.partial(_initialize, layer, own, lambda: on_refused(self), note)
            in_place.replace(layer, "lazy_initialization", given)


def attributes(cache: Any) -> list[dict[str, Any]]:
    """Those of each layer that has keys of its own."""
    return [dict(vars(layer)) for layer in holding(cache)]


def layout(found: tuple[Any, ...]) -> tuple[Any, ...]:
    """Shapes and dtypes of a cache's tensors."""
    return tuple([(tensor.shape, tensor.dtype) for tensor in found])


def addresses(found: tuple[Any, ...]) -> tuple[int, ...]:
    """The tensors' addresses on their device."""
    return tuple([tensor.data_ptr() for tensor in found])


def _initialize(
    layer: Any,
    own: tuple[Any, ...],
    on_refused: Callable[[], None],
    note: Callable[..., None],
    below: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """``StaticLayer.lazy_initialization``, then ``own`` in place of its tensors if they match."""
    in_place.restore(layer, "lazy_initialization", _initialize)
    before = dict(vars(layer))
    below(*args, **kwargs)
    fresh = (layer.keys, layer.values, layer.cumulative_length)
    if all(map(_alike, own, fresh)):
        note(initializing.Initialized.of(layer, before))
        for tensor in own:
            tensor.zero_()
        layer.keys, layer.values, layer.cumulative_length = own
    else:
        on_refused()


def _alike(one: Any, other: Any) -> bool:
    return (one.shape, one.dtype, one.device, one.stride(), one.is_inference()) == (
        *(other.shape, other.dtype, other.device, other.stride()),
        other.is_inference(),
    )


def _any_held(found: tuple[Any, ...]) -> bool:
    """Whether anything other than this tuple holds one of these tensors, or a view of it."""
    import torch

    if not hasattr(torch._C, "_storage_Use_Count"):
        return True
    only_here = (torch.empty(1),)
    (unshared,) = map(_holders, only_here)
    return any(holders != unshared for holders in map(_holders, found))


def _holders(tensor: Any) -> tuple[int, int]:
    import torch

    return sys.getrefcount(tensor), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
