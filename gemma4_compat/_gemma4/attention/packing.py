"""Texts packed into one row: which token belongs to which, by positions that restart.

transformers looks for that only without a mask and without a cache. Here a row holds several texts if the positions of
its tokens count up by one and begin again at 0, and do nothing else. Positions of padding are not looked at:
``generate`` gives it any. Other positions that jump or go back are left to upstream.
"""

from __future__ import annotations

from typing import Any

_MODELS = ("gemma4_text", "gemma4_unified_text")


def numbers(config: Any, embeds: Any, mask: Any, cache: Any, positions: Any) -> Any:
    """For each token the number of its text in its row.

    Args:
        config: of the model, as mask functions get it.
        embeds: (rows, tokens, width), for its shape and device.
        mask: (rows, tokens), not 0 where there is a token; or None.
        cache: or None. One that holds tokens, and a static one, are not for packed texts.
        positions: (rows or 1, tokens), or None.

    Returns:
        int64 of shape (rows, tokens); None if no row has several texts, or if it is not for a Gemma 4. While
        something is traced nobody can know, so there are numbers wherever there could be several texts.
    """
    import torch

    rows, tokens = embeds.shape[:2]
    if positions is None or tokens == 1 or getattr(config, "model_type", None) not in _MODELS:
        return None
    if tuple(positions.shape) not in ((rows, tokens), (1, tokens)) or _is_begun(cache):
        return None
    if mask is not None and tuple(mask.shape) != (rows, tokens):
        return None
    found = _restarts(positions.to(embeds.device), None if mask is None else mask.to(embeds.device, torch.bool))
    return None if _are_read(found) and not bool(found.any()) else found.expand(rows, -1)


def _is_begun(cache: Any) -> bool:
    if cache is None:
        return False
    length = getattr(cache, "get_seq_length", None)  # that of continuous batching has none
    return length is None or getattr(cache, "is_compileable", False) or int(length()) > 0


def _are_read(found: Any) -> bool:
    """Whether the values are there, and reading them disturbs nothing."""
    from transformers import masking_utils

    return not (found.is_meta or masking_utils.is_tracing(found))


def _restarts(positions: Any, mask: Any) -> Any:
    """How many texts have ended before each token; 0 in a row whose positions are not those of packed texts."""
    import torch

    if mask is None:
        jumps = torch.nn.functional.pad(positions.diff(dim=1) != 1, (1, 0))
    else:
        at = torch.arange(positions.shape[1], device=positions.device).expand_as(mask)
        last = at.masked_fill(~mask, -1).cummax(dim=1).values
        before = torch.nn.functional.pad(last[:, :-1], (1, 0), value=-1)  # the last token that is no padding
        positions = positions.expand_as(mask)
        jumps = mask & (before >= 0) & (positions - positions.gather(1, before.clamp(min=0)) != 1)
    others = (jumps & (positions != 0)).any(dim=1, keepdim=True)
    return (jumps & ~others).cumsum(dim=1)
