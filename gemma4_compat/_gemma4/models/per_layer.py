"""The tokens by which the per-layer embeddings of E2B and E4B are looked up if a model gets ``inputs_embeds``.

:func:`tokens_of` finds them among the rows of ``embed_tokens`` as that module returns them, however its weight is
scaled, adapted or stored, with memory for some of the rows at a time. Every other position has the padding token:
images, videos, audio, and what PEFT trains in place of tokens.
"""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from typing import Any

from gemma4_compat._engine.runtime import in_place
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat._gemma4.models import walk

#: Bytes of the numbers by which rows of embeddings are compared, at a time.
SCRATCH = 2**26
#: Per-layer inputs on their way through a forward that has no argument for them.
_given: ContextVar[Any] = ContextVar("gemma4_compat_per_layer_inputs", default=None)


def handed_over(inputs: Any) -> contextlib.AbstractContextManager[None]:
    return in_place.bound(_given, inputs)


def given() -> Any:
    """The inputs that were :func:`handed_over`, if any."""
    return _given.get()


def text_model(model: Any) -> Any:
    """The ``Gemma4TextModel`` in a model of any class; None if it has no per-layer embeddings."""
    inner = getattr(model, "model", model)
    found = getattr(inner, "language_model", inner)
    return found if getattr(found, "hidden_size_per_layer_input", 0) else None


def inputs_of(model: Any, tokens: Any) -> Any:
    """The per-layer inputs of ``tokens``, as in a forward of ``model`` with these ``input_ids``."""
    text = text_model(model)
    for name in ("image_token_id", "video_token_id", "audio_token_id"):
        if (media := getattr(model.config, name, None)) is not None:
            tokens = tokens.masked_fill(tokens == media, text.config.pad_token_id)
    return text.get_per_layer_inputs(tokens, None)


def known_inputs(model: Any, tokens: Any, embeds: Any) -> Any:
    """The same for embeddings that come with ``tokens``. An embedding that belongs to another token counts as that
    token.
    """
    import torch

    with torch.no_grad():
        text = text_model(model)
        own = text.embed_tokens(tokens)
        other = (own.to(embeds.device) != embeds).any(-1)
        if other.any():
            found = _search(text, embeds[other]).to(tokens.device)
            tokens = tokens.clone()
            tokens[other.to(tokens.device)] = torch.where(found < 0, tokens[other.to(tokens.device)], found)
    return inputs_of(model, tokens)


def tokens_of(text: Any, embeds: Any) -> Any:
    """The token of each embedding.

    Raises:
        Gemma4CompatError: an embedding belongs to no token, or to several with different per-layer embeddings.
    """
    import torch

    with torch.no_grad():
        tokens = torch.full(embeds.shape[:-1], text.config.pad_token_id, device=embeds.device)
        sought = ~_is_placeholder(text, embeds)
        if sought.any():
            tokens[sought] = _search(text, embeds[sought]).to(tokens.device)
    if (lost := (tokens < 0).nonzero()).numel():
        raise Gemma4CompatError(
            f"{len(lost)} of {tokens.numel()} inputs_embeds (the first is at {tuple(lost[0].tolist())}) are the "
            "embedding of no token, and per-layer embeddings are looked up by tokens; pass "
            "per_layer_inputs=get_per_layer_inputs(tokens, None) of the language model, with the padding token for "
            "what is no token, or give generate the tokens as input_ids as well"
        )
    return tokens


def _is_placeholder(text: Any, embeds: Any) -> Any:
    """Where ``Gemma4Model.forward`` put the padding token's row, unscaled, for an image, video or audio."""
    import torch

    weight = getattr(text.embed_tokens, "weight", None)
    if weight is None or weight.device.type == "meta" or not weight.is_floating_point():
        return torch.zeros(embeds.shape[:-1], dtype=torch.bool, device=embeds.device)
    return (embeds == weight[text.config.pad_token_id].to(embeds.device)).all(-1)


def _search(text: Any, embeds: Any) -> Any:
    """The token of each of these embeddings (number, width), or -1 for an embedding of no token.

    Rows are compared by one number each, and by their values if the numbers agree.
    """
    import torch

    embedding, size = text.embed_tokens, text.config.vocab_size
    innermost = walk.innermost(embedding)
    device = module_hooks.hook_device(innermost)
    tokens = torch.arange(size, device=innermost.weight.device if device is None else device)
    table = embedding(tokens[:1])
    rows = embeds.detach().to(table.device)
    step = max(1, SCRATCH // (16 * rows.shape[-1]))
    wanted, which = torch.cat([_numbers(part.to(table.dtype)) for part in rows.split(step)]).unique(
        return_inverse=True
    )
    hits = []
    for part in tokens.split(step):
        numbers = _numbers(embedding(part))
        places = torch.searchsorted(wanted, numbers).clamp_(max=len(wanted) - 1)
        hit = wanted[places] == numbers
        hits.append((places[hit], part.to(hit.device)[hit]))
    places, tokens = (torch.cat(column) for column in zip(*hits))
    lowest = torch.full_like(wanted, size).scatter_reduce_(0, places, tokens, "amin")
    _require_same(text, tokens, lowest[places])
    found = lowest[which]
    found[found == size] = -1
    for part, tokens in zip(rows.split(step), found.split(step)):
        tokens[(embedding(tokens.clamp(min=0)) != part).any(-1)] = -1
    return found


def _numbers(rows: Any) -> Any:
    """A number for each row; equal rows have equal numbers."""
    import torch

    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = (rows + 0).view(kinds[rows.element_size()]).long()  # -0.0 + 0 is 0.0
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, rows.shape[-1:], generator=generator).to(rows.device) | 1
    return bits.mul_(factors).sum(-1)


def _require_same(text: Any, tokens: Any, first: Any) -> None:
    """Tokens with the same embedding must have the same per-layer embeddings; padding is padding."""
    doubled = (tokens != first) & (first != text.config.pad_token_id)
    if not doubled.any():  # split() would give one part without rows, which a table of packed weights cannot look up
        return
    for one, other in zip(first[doubled].split(256), tokens[doubled].split(256)):
        differ = (text.embed_tokens_per_layer(one) != text.embed_tokens_per_layer(other)).any(-1)
        if differ.any():
            pair = one[differ.to(one.device)][0].item(), other[differ.to(one.device)][0].item()
            raise Gemma4CompatError(
                f"the tokens {pair[0]} and {pair[1]} have the same embedding but different per-layer ones, so "
                "inputs_embeds do not say which one is meant; pass per_layer_inputs=get_per_layer_inputs(tokens, "
                "None) of the language model, or give generate the tokens as input_ids as well"
            )
