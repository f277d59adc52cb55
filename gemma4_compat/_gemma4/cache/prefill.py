"""How ``generate`` reads a prompt, for the patches of ``GenerationMixin._prefill``. Imports nothing upstream."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from gemma4_compat._engine.runtime import in_place
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.cache import cache_names

#: A keyword argument that models pass on to their layers: nobody reads what this forward returns. The patch that has
#: KV-shared layers skip such a forward, and the class of layers that it patches.
UNREAD, UNREAD_PATCH, UNREAD_LAYER = "gemma4_compat_unread", "transformers-unread-chunks", "Gemma4TextDecoderLayer"


def new_tokens(input_ids: Any, generation_config: Any, model_kwargs: dict[str, Any]) -> int:
    """How many of ``input_ids`` (batch, tokens) are read, computed as in ``_prefill``: all, or those that the cache
    does not hold.
    """
    whole, mask, cache = input_ids.shape[1], model_kwargs.get("attention_mask"), cache_names.cache_in(model_kwargs)
    told = getattr(generation_config, "_mask_length", -1) if mask is None else mask.shape[1]
    return int(whole - cache.get_seq_length()) if cache is not None and told == whole else int(whole)


def nothing_new(held: int, length: int) -> Gemma4CompatError:
    """Why a prompt of ``length`` tokens is refused with a cache that holds so many."""
    return Gemma4CompatError(
        f"the cache holds {held} tokens, and the prompt with its attention_mask has {length}: "
        "there is nothing new to read. Pass the whole text, at least one token longer than the cache, or "
        "only its new tokens with an attention_mask for the whole text. Without the cache any prompt is "
        "read, and gemma4_compat.decode_fast(model, reuse_prefix=True) keeps a cache that serves shorter prompts "
        "as well."
    )


#: Per thread, what :func:`hides_nothing` found before a capture, which cannot read a mask.
_found = threading.local()


def hides_nothing(mask: Any, tokens: int) -> bool:
    """Whether a mask of one position lets it attend to the whole prompt. While compiling, nobody can know.

    Args:
        mask: bool of shape [batch, heads, 1, keys]; None or another dtype gives False.
        tokens: of the prompt, the first keys.
    """
    import torch

    before: bool | None = getattr(_found, "before", None)
    if before is not None:
        return before
    if mask is None or mask.dtype != torch.bool or torch.compiler.is_compiling():
        return False
    return bool(mask[..., :tokens].all())


def is_captured() -> bool:
    """Whether this thread captures the forward of a prompt."""
    return getattr(_found, "before", None) is not None


def known_to_hide_nothing(found: bool) -> contextlib.AbstractContextManager[None]:
    """Inside a capture, :func:`hides_nothing` returns what it has found for the same prompt before."""
    return in_place.here(_found, before=found)
