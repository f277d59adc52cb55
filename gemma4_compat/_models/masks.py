"""Masks for prompts with images, of a cache whose layers do not all hold the same tokens.

transformers 5.13.0 to 5.16.1 make the mask of the sliding layers in the shape of a layer of full attention. With
:class:`OneKind`, all layers of the cache appear to be of one kind, and its mask gets the right shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_CACHE = "past_key_values"


class OneKind:
    """A cache that reports, for every layer, the sizes of the first layer of one kind."""

    def __init__(self, cache: Any, sliding: bool) -> None:
        self._cache = cache
        self._index = cache.is_sliding.index(sliding)
        self.is_sliding = [sliding] * len(cache.layers)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> Any:
        return self._cache.get_mask_sizes(query_length, self._index)

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        return self._cache.get_query_offset(self._index)

    def __getattr__(self, name: str) -> Any:
        if name == "_cache":
            raise AttributeError(name)
        return getattr(self._cache, name)


def masks(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``create_masks_for_vision_model`` (called with keywords), each mask with the sizes of its own layers."""
    cache = kwargs.get(_CACHE)
    if len(set(getattr(cache, "is_sliding", ()))) < 2:
        return original(*args, **kwargs)
    kinds = {"full_attention": False, "sliding_attention": True}
    return {
        kind: original(*args, **{**kwargs, _CACHE: OneKind(cache, sliding)})[kind] for kind, sliding in kinds.items()
    }
