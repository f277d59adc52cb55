"""Masks for prompts with images, in models whose image tokens attend to each other (26B-A4B, 31B).

transformers before 5.13.0 builds these masks differently: :func:`of_images`. 5.13.0 to 5.16.1 give the mask of the
sliding layers the shape of a full-attention layer, even if the layers of a cache do not all hold the same tokens. With
:class:`OneKind`, all layers of the cache appear to be of one kind, and its mask gets the right shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gemma4_compat._engine.runtime.views import PlainView
from gemma4_compat._gemma4.cache import cache_names

_CACHE = "past_key_values"
#: What transformers' functions that make a mask have to be given. They also take functions, and the numbers of images.
NAMES = ("config", "inputs_embeds", "attention_mask", cache_names.NEW, "position_ids")
FUNCTIONS = ("or_mask_function", "and_mask_function")
IMAGES = "block_sequence_ids"


class OneKind(PlainView):
    """A cache that reports, for every layer, the sizes of the first layer of one kind."""

    def __init__(self, cache: Any, sliding: bool) -> None:
        super().__init__(cache)
        self._index = cache.is_sliding.index(sliding)
        self.is_sliding = [sliding] * len(cache.layers)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> Any:
        return self._of.get_mask_sizes(query_length, self._index)

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        return self._of.get_query_offset(self._index)


def masks(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``create_masks_for_vision_model`` (called with keywords), each mask with the sizes of its own layers."""
    cache = kwargs.get(_CACHE)
    if len(set(getattr(cache, "is_sliding", ()))) < 2:
        return original(*args, **kwargs)
    kinds = {"full_attention": False, "sliding_attention": True}
    return {
        kind: original(*args, **{**kwargs, _CACHE: OneKind(cache, sliding)})[kind] for kind, sliding in kinds.items()
    }


def by_kind(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What ``create_masks_for_generate`` makes, called with the configuration of the text model, of patched functions.

    Upstream's table of mask functions holds the unpatched ones.
    """
    from transformers import masking_utils

    known = {*NAMES, *FUNCTIONS, IMAGES}
    arguments = cache_names.renamed(arguments, cache_names.NEW)
    given = {name: value for name, value in arguments.items() if name in known and value is not None}
    given = cache_names.renamed(dict.fromkeys(NAMES) | given, cache_names.of(masking_utils.create_causal_mask))
    return {
        "full_attention": masking_utils.create_causal_mask(**given),
        "sliding_attention": masking_utils.create_sliding_window_causal_mask(**given),
    }


def image_numbers(kinds: Any) -> Any:
    """For each token the number of its image or video frame; -1 for other tokens. ``kinds``: ``mm_token_type_ids``."""
    import torch

    vision = (kinds == 1) | (kinds == 2)
    before = torch.nn.functional.pad(vision[:, :-1], (1, 0))
    return torch.where(vision, (vision & ~before).cumsum(dim=1) - 1, -1)


def of_images(images: Any, texts: Any = None, *, config: Any, inputs_embeds: Any, **arguments: Any) -> dict[str, Any]:
    """The masks of transformers 5.13 and newer: causal in full attention; in sliding layers the tokens of an image
    also attend to each other, within the window.

    Args:
        images: see :func:`image_numbers`, from the start of the text.
        texts: for each token the number of its text, if a row holds several and there is nothing before them.
        config: of the text model.
        inputs_embeds: for its shape, dtype and device.
        arguments: for transformers' functions that create masks.
    """
    import torch
    from transformers import masking_utils

    arguments |= {"config": config, "inputs_embeds": inputs_embeds}
    if texts is not None:
        arguments |= {"position_ids": None, "and_mask_function": masking_utils.packed_sequence_mask_function(texts)}
    full = masking_utils.create_causal_mask(**arguments)
    if inputs_embeds.shape[1] > 1:  # a token on its own sees no later token
        images, last = images.to(inputs_embeds.device), images.shape[1] - 1

        def in_one_image(batch: Any, head: Any, query: Any, key: Any) -> Any:
            number = images[batch, query.clamp(max=last)]  # a static cache, and new tokens, reach beyond the prompt
            same = number == images[batch, key.clamp(max=last)]
            return same & (number >= 0) & torch.maximum(query, key).le(last)

        window = masking_utils.sliding_window_overlay(config.sliding_window)
        arguments["or_mask_function"] = masking_utils.and_masks(window, in_one_image)
    return {"full_attention": full, "sliding_attention": masking_utils.create_sliding_window_causal_mask(**arguments)}
