"""Texts packed into one row: which token belongs to which, by positions that restart.

transformers looks for that only without a mask and without a cache. Here a row holds several texts if the positions of
its tokens count up by one and begin again at 0, and do nothing else. Positions of padding are not looked at:
``generate`` gives it any. Other positions that jump or go back are left to upstream.

:func:`by_text` stands for the mask of such rows. It grows with their length, and a mask with the square of that. It is
compared inside a captured graph, which then serves texts with any boundaries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gemma4_compat._gemma4.attention.block_layout import Layout

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


def by_text(texts: Any, mask: Any) -> Any:
    """What stands for the mask of a layer: a token sees those of its text up to itself, as far as the window reaches.

    Args:
        texts: (rows, tokens), for each token the number of its text.
        mask: (rows, tokens), bool, where there is a token; or None.

    Returns:
        int32 of shape (rows, 2, 1, tokens): the number of each query's text, and of each key's, -1 if nobody sees it.
    """
    import torch

    keys = texts if mask is None else texts.masked_fill(~mask, -1)
    return torch.stack([texts, keys], dim=1)[:, :, None].to(torch.int32)


def is_by_text(mask: Any) -> bool:
    """Whether this stands for a mask, which is never of integers."""
    import torch

    return mask is not None and mask.dtype == torch.int32 and mask.ndim == 4 and mask.shape[1:3] == (2, 1)


def fits(mask: Any, query: Any, keys: int) -> bool:
    """Whether this is a mask, or stands for one, of all these queries, (rows, heads, queries, width), and keys."""
    rows, heads, queries, _ = query.shape
    if is_by_text(mask):
        return bool(mask.shape[3] == queries == keys)
    shape = mask.shape
    return bool(len(shape) == 4 and shape[2:] == (queries, keys) and shape[0] in (1, rows) and shape[1] in (1, heads))


def part(mask: Any, queries: slice, keys: slice, window: int | None) -> Any:
    """The mask of these queries and keys, (rows or 1, heads or 1, queries, keys).

    ``window``: of the layer, for what stands for a mask, which does not hold it.
    """
    if not is_by_text(mask):
        return mask[:, :, queries, keys]
    late = queries.start - keys.start
    found = (mask[:, :1, 0, queries, None] == mask[:, 1:, :, keys]).tril_(late)
    return found if window is None else found.triu_(late - window + 1)


def blocks(mask: Any, rows: int, layout: Layout, window: int) -> Any:
    """The masks of the whole blocks of a layout, (rows * blocks, heads or 1, queries, keys).

    Blocks may have keys that are not there: a bool mask, and what stands for one, shows them to no query.
    """
    import torch

    if not is_by_text(mask):
        mask = mask.expand(rows, -1, -1, -1)
        parts = [_padded(mask[:, :, query], key, False) for query, key in layout.middle()]
        return torch.stack(parts, dim=1).flatten(0, 1)
    begin, end = layout.first * layout.block, layout.last * layout.block
    queries = mask[:, 0, 0, begin:end].unflatten(1, (layout.count, layout.block, 1))
    keys = _padded(mask[:, 1, 0], slice(layout.start + begin, layout.start + end - layout.block + layout.width), -1)
    found = queries == keys.unfold(1, layout.width, layout.block)[:, :, None]
    return found.tril_(-layout.start).triu_(1 - layout.start - window).flatten(0, 1)[:, None]


def _padded(tensor: Any, keys: slice, value: int) -> Any:
    """These keys of (..., keys), of which some may be before the first one, or after the last."""
    import torch

    missing = max(-keys.start, 0), max(keys.stop - tensor.shape[-1], 0)
    found = tensor[..., max(keys.start, 0) : keys.stop]
    return torch.nn.functional.pad(found, missing, value=value) if any(missing) else found


def whole(mask: Any, queries: int, window: int | None) -> Any:
    """The mask of all keys and of the last ``queries`` tokens, bool; a mask as it is."""
    if not is_by_text(mask):
        return mask
    tokens = mask.shape[3]
    return part(mask, slice(tokens - queries, tokens), slice(0, tokens), window)


def written_out(
    attention: Callable[..., Any], module: Any, query: Any, key: Any, value: Any, mask: Any = None, **kwargs: Any
) -> Any:
    """What ``attention`` computes with a mask, also where something stands for it."""
    mask = whole(mask, query.shape[2], getattr(module, "sliding_window", None))
    return attention(module, query, key, value, mask, **kwargs)
