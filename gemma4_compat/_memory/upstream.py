"""How the installed transformers behaves where that decides how many bytes a forward takes.

If upstream has a function that decides, it is called.
"""

from __future__ import annotations

import inspect
from typing import Any

from gemma4_compat._engine import versions


def math_attention() -> bool:
    """Whether heads wider than 256 go to SDPA's fp32 "math" kernel, which holds all scores."""
    import torch
    from transformers.integrations.sdpa_attention import use_gqa_in_sdpa

    key = torch.empty(1, 1, 1, 512, device="meta")
    given = {"attention_mask": None, "key": key, "value": key}
    return bool(use_gqa_in_sdpa(**{name: given[name] for name in inspect.signature(use_gqa_in_sdpa).parameters}))


def one_query(text_model: Any) -> bool:
    """Whether only the last position of a prefill goes through the KV-shared layers."""
    return hasattr(type(text_model), "_maybe_slice_kv_shared_inputs")


def one_query_packed() -> bool:
    """Whether one query with a mask is computed without repeating keys and values for every head."""
    from transformers.integrations import sdpa_attention

    return hasattr(sdpa_attention, "pack_gqa")


def static_masks() -> bool:
    """Whether a mask covers a whole static cache that a prompt does not fill."""
    from transformers.masking_utils import _ignore_causal_mask_sdpa

    given = dict.fromkeys(("padding_mask", "local_attention_size")) | {"q_offset": 0, "kv_offset": 0}
    given |= {"q_length": 2, "query_length": 2, "kv_length": 4}  # a prompt of two in a cache of four
    names = inspect.signature(_ignore_causal_mask_sdpa).parameters
    return not _ignore_causal_mask_sdpa(**{name: given[name] for name in names})


def one_hot_positions() -> bool:
    """Whether image positions are looked up with a one-hot matrix."""
    import transformers

    return versions.admits("<5.10", transformers.__version__)
