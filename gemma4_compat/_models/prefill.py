"""How ``generate`` reads a prompt, for the patches of ``GenerationMixin._prefill``. Imports nothing upstream."""

from __future__ import annotations

from typing import Any

from gemma4_compat._models import cache_names


def new_tokens(input_ids: Any, generation_config: Any, model_kwargs: dict[str, Any]) -> int:
    """How many of ``input_ids`` (batch, tokens) are read, computed as in ``_prefill``: all, or those that the cache
    does not hold. Before transformers 5.22 all are read in chunks, whatever the cache holds.
    """
    whole, mask, cache = input_ids.shape[1], model_kwargs.get("attention_mask"), cache_names.cache_in(model_kwargs)
    told = getattr(generation_config, "_mask_length", -1) if mask is None else mask.shape[1]
    return int(whole - cache.get_seq_length()) if cache is not None and told == whole else int(whole)
