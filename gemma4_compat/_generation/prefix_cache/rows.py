"""The keys and values in the layers of a cache, by position.

A layer is one of transformers' ``DynamicLayer``, ``DynamicSlidingWindowLayer``, ``StaticLayer`` or
``StaticSlidingWindowLayer`` (5.5.0 to 5.24.0), with ``keys`` and ``values`` of shape [batch, heads, rows, width]. A
sliding layer keeps the rows that its next token sees, which are one fewer than its window.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from gemma4_compat._engine.runtime import in_place
from gemma4_compat._gemma4.cache import prefill
from gemma4_compat._gemma4.state import contents
from gemma4_compat._graphs import static_caches

_FULL, _SLIDING = ("DynamicLayer", "StaticLayer"), ("DynamicSlidingWindowLayer", "StaticSlidingWindowLayer")
#: So many rows before the window are kept with the end of a prompt, to cut it a little before its end.
SLACK = 64


class Rows(NamedTuple):
    """Keys and values of one layer at the positions from ``start`` on."""

    start: int
    keys: Any
    values: Any

    @property
    def end(self) -> int:
        """The position after the last row."""
        return self.start + int(self.keys.shape[-2])

    def between(self, start: int, end: int) -> Rows:
        """A view of those rows."""
        first, last = start - self.start, end - self.start
        return Rows(start, self.keys[..., first:last, :], self.values[..., first:last, :])

    def copied(self, device: Any = None) -> Rows:
        """The same rows in memory of their own, on another device if one is given."""
        return Rows(self.start, *(tensor.to(device or tensor.device, copy=True) for tensor in self[1:]))

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return int(self.keys.nbytes + self.values.nbytes)


#: By the index of the layer.
Layers = dict[int, Rows]


def is_known(cache: Any) -> bool:
    """Whether this module knows all layers of a cache, and they stay where they are."""
    layers = getattr(cache, "layers", None)
    if layers is None or getattr(cache, "offloading", False):
        return False
    return all(type(layer).__name__ in (*_FULL, *_SLIDING, "DummyLayer") for layer in layers)


def is_sliding(layer: Any) -> bool:
    """Whether a layer drops rows that its window has passed."""
    return type(layer).__name__ in _SLIDING


def held(cache: Any) -> int:
    """How many tokens a cache holds."""
    layers = [layer for layer in cache.layers if _has_rows(layer)]
    # A static full layer counts on the device.
    return int(max(layers, key=is_sliding).get_seq_length()) if layers else 0


def _has_rows(layer: Any) -> bool:
    return type(layer).__name__ in (*_FULL, *_SLIDING) and bool(layer.is_initialized)


def of(cache: Any) -> Layers:
    """Views of all rows that a cache holds."""
    tokens = held(cache)
    return {index: _of(layer, tokens) for index, layer in enumerate(cache.layers) if _has_rows(layer)}


def _of(layer: Any, tokens: int) -> Rows:
    there = int(layer.keys.shape[-2])
    if tokens <= there:
        return Rows(0, layer.keys[..., :tokens, :], layer.values[..., :tokens, :])
    return Rows(tokens - there, layer.keys, layer.values)


def digest(found: Layers) -> tuple[int, ...]:
    """A number for all values of these rows."""
    return contents.digest(tensor for one in found.values() for tensor in (one.keys, one.values))


def sliding(cache: Any) -> list[int]:
    """The indices of the sliding layers."""
    return [index for index, layer in enumerate(cache.layers) if _has_rows(layer) and is_sliding(layer)]


def longest(spans: Sequence[tuple[int, int]], window: int, limit: int) -> int:
    """The longest text, of at most ``limit`` tokens, after which the next token finds all rows that it sees.

    Args:
        spans: begin and end of rows that are there.
        window: of the layer, in tokens.
        limit: in tokens.
    """
    best, joined = 0, list[tuple[int, int]]()
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    for start, end in joined:
        found = min(end, limit)
        if max(found - window + 1, 0) >= start and found > start:
            best = max(best, found)
    return best


def joined(parts: Sequence[Rows], start: int, end: int) -> Rows:
    """A copy of the rows from ``start`` to ``end``, each from one of these parts.

    Raises:
        LookupError: one of them is in none of the parts.
    """
    import torch

    found: list[Rows] = []
    at = start
    while at < end:
        part = next((part for part in parts if part.start <= at < part.end), None)
        if part is None:
            raise LookupError(f"no row at position {at}")
        found.append(part.between(at, min(part.end, end)))
        at = found[-1].end
    keys, values = (torch.cat([getattr(rows, name) for rows in found], dim=-2) for name in ("keys", "values"))
    return Rows(start, keys, values)


def fill(cache: Any, index: int, found: Rows, tokens: int) -> None:
    """Have an empty layer of a cache hold these rows, as if it had read so many tokens."""
    import torch

    keys, values = found.keys, found.values
    layer = cache.layers[index] if index < len(cache.layers) else None
    slots = getattr(layer, "max_cache_len", 0)
    if type(layer).__name__ == _SLIDING[1] and tokens >= slots > keys.shape[-2]:
        # The first slot of a full window is the one that goes next: nothing reads it.
        keys, values = (torch.cat([rows[..., :1, :], rows], dim=-2) for rows in (keys, values))
    cache.update(keys, values, index)
    layer = cache.layers[index]
    for name in ("cumulative_length_int", "cumulative_length"):
        if isinstance(getattr(layer, name, None), int):
            setattr(layer, name, tokens)


def cut(cache: Any, layers: Layers, tokens: int) -> None:
    """Have a static cache hold only its first tokens, in the memory that it has. ``layers``: of sliding ones."""
    for index, layer in enumerate(cache.layers):
        if index in layers:
            layer.cumulative_length.zero_()
            layer.cumulative_length_int = 0
            fill(cache, index, layers[index], tokens)
        elif _has_rows(layer):
            layer.cumulative_length.fill_(tokens)


@contextlib.contextmanager
def noting(cache: Any, into: Layers, window: int) -> Iterator[None]:
    """Inside, an update of several tokens notes the rows that end with them: the window, and some before it."""
    with contextlib.ExitStack() as stack:
        for index, layer in enumerate(cache.layers):
            if is_sliding(layer):
                noted = functools.partial(_note, index, layer, into, window - 1 + SLACK)
                stack.enter_context(in_place.replaced(layer, "update", noted))
        yield


def _note(
    index: int, layer: Any, into: Layers, most: int, below: Any, keys: Any, *args: Any, **kwargs: Any
) -> tuple[Any, Any]:
    found: tuple[Any, Any] = below(keys, *args, **kwargs)
    if keys.shape[-2] > 1 and found[0] is not layer.keys and not prefill.is_captured():
        first = max(found[0].shape[-2] - most, 0)
        own = (rows[..., first:, :].clone() for rows in found)
        into[index] = Rows(int(layer.get_seq_length()) - (found[0].shape[-2] - first), *own)
    return found


def length(cache: Any) -> int | None:
    """For how many tokens a static cache has room; None for another cache."""
    return static_caches.length(cache) if static_caches.is_static(cache) else None
