"""The weights of attention that a kernel does not give: computed beside it, as ``eager`` computes them.

The kernel's output is kept, so asking for the weights changes no logit.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

from gemma4_compat._gemma4.attention import flash, packing
from gemma4_compat._gemma4.state import checkpointing

_FAMILY = "transformers.models.gemma4"


@functools.lru_cache(maxsize=16)
def over(found: Callable[..., Any]) -> Callable[..., Any]:
    """The attention function ``found``, with weights where it is called for a Gemma 4 and returns none."""
    return functools.partial(attention, found)


def attention(
    whole: Callable[..., Any], module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **kwargs: Any
) -> tuple[Any, Any]:
    """The output of ``whole``, and the weights, (rows, heads, queries, keys), of the same queries and keys.

    Without dropout, which would draw other random numbers, and inside a checkpoint without gradients: it would compute
    them again in the backward pass, where nothing is collected.
    """
    import torch

    layer: Any = type(module)
    eager = _eager(layer)
    if eager is not None:
        kwargs.pop("output_attentions", None)  # transformers' function for sdpa would say that it gives none
    output, weights = whole(module, query, key, value, attention_mask, **kwargs)
    if eager is None or (weights is not None and weights.ndim == 4):  # flex attention gives sums of exponentials
        return output, weights
    mask = _seen(module, query, key, attention_mask, kwargs)
    if mask is not None and not mask.is_floating_point():
        mask = torch.zeros((), dtype=query.dtype, device=query.device).where(mask, torch.finfo(query.dtype).min)
    given = {name: kwargs[name] for name in ("scaling", "softcap") if name in kwargs}
    checkpoints = checkpointing.saved_tensors_hooks() is not None
    with torch.no_grad() if checkpoints else contextlib.nullcontext():
        return output, eager(module, query, key, value, mask, **given)[1]


@functools.cache
def _eager(layer: type[Any]) -> Callable[..., Any] | None:
    """``eager`` in the file of the layer's class, or of the one that it is made from; None for another model's."""
    homes = [sys.modules[kind.__module__] for kind in layer.__mro__ if kind.__module__.startswith(_FAMILY)]
    return getattr(homes[0], "eager_attention_forward", None) if homes else None


def _seen(module: Any, query: Any, key: Any, mask: Any, given: dict[str, Any]) -> Any:
    """The mask with four dimensions, bool or added to scores, that says what the kernel sees; None: everything."""
    import torch

    rows, _, queries, _ = query.shape
    keys = key.shape[2]
    if hasattr(mask, "mask_mod"):  # of flex attention
        from torch.nn.attention.flex_attention import create_mask

        return create_mask(mask.mask_mod, rows, 1, queries, keys, device=str(query.device))
    if mask is not None and mask.ndim == 4:
        return packing.whole(mask, queries, getattr(module, "sliding_window", None))
    causal = given.get("is_causal")
    causal = queries > 1 and (getattr(module, "is_causal", True) if causal is None else causal)
    kernel = flash.is_flash(module.config._attn_implementation)
    late = keys - queries if kernel else 0  # a flash kernel aligns the last ones, sdpa the first
    at, key_at = torch.arange(queries, device=query.device)[:, None] + late, torch.arange(keys, device=query.device)
    seen = key_at <= at if causal else torch.ones(queries, keys, dtype=torch.bool, device=query.device)
    if kernel and (window := given.get("sliding_window")):
        seen = seen & (key_at > at - window)
    if mask is not None:  # a flash kernel's, where there are tokens
        seen = seen & torch.nn.functional.pad(mask.bool(), (0, keys - mask.shape[1]))[:, None, None]
    elif kernel and (texts := _texts(given, rows, queries, keys)) is not None:
        seen = seen & (texts[:, None, :, None] == texts[:, None, None, :])
    return seen if kernel or causal else None


def _texts(given: dict[str, Any], rows: int, queries: int, keys: int) -> Any:
    """For each token the number of its text, as a flash kernel finds it by positions in one row; None without any."""
    from transformers import masking_utils

    positions = given.get("position_ids")
    if positions is None or rows > 1 or queries != keys:
        return None
    return masking_utils.find_packed_sequence_indices(positions)
