"""The cache that ``generate`` returns after ``decode_fast``: a dynamic one, in which a next turn has room.

Called by ``patches/generation/transformers_graph_decoding.py``. The static cache that a call decodes with is as long
as its text, and its memory serves the next call. So its contents are copied into the cache that ``generate`` would
have made.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from gemma4_compat._gemma4.cache import cache_names
from gemma4_compat._generation.prefix_cache import rows
from gemma4_compat._graphs import decoder, static_caches

_running = threading.local()


class Call:
    """One ``generate``.

    Args:
        model: a transformers model.
        is_own: a loop of the caller's decodes (``custom_generate``), in a cache as without ``decode_fast``.

    Attributes:
        cache: an empty one, to be returned in place of a static one that nobody asked for; None if none is returned.
    """

    def __init__(self, model: Any, *, is_own: bool) -> None:
        self.model, self.is_own = model, is_own
        self.cache: Any = None

    def output(self, output: Any) -> Any:
        """What ``generate`` returns, with that cache."""
        name = next((name for name in cache_names.NAMES if name in output), None) if isinstance(output, dict) else None
        if name is not None and self.cache is not None and static_caches.is_static(output[name]):
            self._fill(output[name])
            setattr(output, name, self.cache)
        return output

    def _fill(self, static: Any) -> None:
        import torch

        found, tokens = rows.of(static), rows.held(static)
        before = [dict(vars(layer)) for layer in self.cache.layers]
        try:
            for index in sorted(found):
                rows.fill(self.cache, index, found[index], tokens)
            return
        except torch.OutOfMemoryError:
            pass  # not both caches at once, then: a layer at a time
        for layer, attributes in zip(self.cache.layers, before):
            vars(layer).clear()
            vars(layer).update(attributes)
        decoding = decoder.of(self.model)
        memory = decoding.memory_of(static)
        if memory is not None:
            decoding.drop(memory)
        del memory
        for index in sorted(found):
            rows.fill(self.cache, index, found.pop(index), tokens)
            layer = static.layers[index]
            layer.keys = layer.values = None
            layer.is_initialized = False


def current(model: Any) -> Call | None:
    """The call of this thread, if it is this model's."""
    found: Call | None = getattr(_running, "call", None)
    return found if found is not None and found.model is model else None


@contextlib.contextmanager
def running(model: Any, *, is_own: bool) -> Iterator[Call]:
    """Inside, :func:`current` finds this call in this thread."""
    before = getattr(_running, "call", None)
    _running.call = found = Call(model, is_own=is_own)
    try:
        yield found
    finally:
        _running.call = before
