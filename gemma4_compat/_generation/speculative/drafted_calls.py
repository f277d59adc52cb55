"""Which calls with an assistant model or prompt lookup are decoded in speculative steps, and which without."""

from __future__ import annotations

from typing import Any

from gemma4_compat._gemma4.cache import cache_names
from gemma4_compat._generation import experts_alone
from gemma4_compat._generation.sampling import fast_processors
from gemma4_compat._graphs import deferred_stop, static_caches, unsupported

#: Beginnings of the names of classes that draft from keys and values of the model.
_ASSISTANTS = ("Gemma4Assistant", "Gemma4UnifiedAssistant")
#: What transformers sets ``cache_implementation`` to with an assistant, before 5.24.
_OF_ASSISTANTS = "dynamic_full"
#: transformers' processors that expect one call for each token, in order. Rejected drafts would stay in them.
_WITH_A_STATE = ("SynthIDTextWatermarkLogitsProcessor",)


def unsupported_reason(model: Any, ids: Any, config: Any, given: dict[str, Any]) -> str | None:
    """Why a text cannot be decoded in speculative steps; None if nothing is known to be in the way.

    Args:
        model: of transformers, after ``decode_fast``.
        ids: (batch, length), the prompt.
        config: the ``GenerationConfig`` of the call.
        given: the other arguments of ``GenerationMixin._assisted_decoding``.
    """
    from gemma4_compat._kernels.match import custom

    assistant = given.get("assistant_model")
    looks_up = getattr(config, "prompt_lookup_num_tokens", None) is not None
    text = model.config.get_text_config()
    reasons = {
        "the assistant is no Gemma 4 assistant": not (looks_up or type(assistant).__name__.startswith(_ASSISTANTS)),
        "the cache is the caller's": is_given(cache_names.cache_in(given)),
        "more is returned than tokens": bool(config.return_dict_in_generate),
        "a logits processor is not transformers' own": not all(map(deferred_stop.is_pure, given["logits_processor"])),
        "attention is not sdpa": text._attn_implementation != "sdpa",
        "the prompt is padded, or not of tokens": not _is_plain(ids, given),
    }
    found = _call_reason(config, given) or next((reason for reason, holds in reasons.items() if holds), None)
    if found is None and not looks_up:
        found = _assistant_reason(model, assistant)
    return found or unsupported.virtual_tokens_reason(model) or custom.unsupported_reason(model.device)


def undrafted_reason(model: Any, ids: Any, config: Any, given: dict[str, Any]) -> str | None:
    """Why a text is that without an assistant only if nothing is drafted; None if drafts may be tried.

    Args: as of :func:`unsupported_reason`. None as well for calls that only transformers' loop for assistants takes.
    """
    cache = cache_names.cache_in(given)
    if _call_reason(config, given) or not ids.numel():
        return None
    reasons = {
        "a logits processor remembers the tokens that it has seen": any(
            fast_processors.is_class(one, name) for one in given["logits_processor"] for name in _WITH_A_STATE
        ),
        "no token can be taken back from a static cache": is_given(cache) and static_caches.is_static(cache),
        # Speculative steps need a cache of their own, and transformers' loop rounds in another way.
        "the cache holds the beginning of the text": is_given(cache) and bool(cache.get_seq_length()),
    }
    found = next((reason for reason, holds in reasons.items() if holds), None)
    if found is None and experts_alone.has_experts(model):
        # A try would not find that out: it depends on which experts the tokens of a speculative step share. And in
        # transformers' loop for assistants, upstream's experts see all drafts at once.
        found = experts_alone.unsupported_reason(model) or unsupported_reason(model, ids, config, given)
    return found


def is_given(cache: Any) -> bool:
    """Whether the caller has passed this cache on."""
    return bool(getattr(cache, "_is_user_defined", False))


def keeps_all(config: Any) -> bool:
    """Whether the call returns the cache of transformers' loop for assistants, which no static one can become."""
    return bool(config.return_dict_in_generate) and config.cache_implementation == _OF_ASSISTANTS


def _call_reason(config: Any, given: dict[str, Any]) -> str | None:
    """What only transformers' loop for assistants has; None if the call asks for none of it."""
    reasons = {
        "there is no cache": cache_names.cache_in(given) is None,
        "cache_implementation is set": config.cache_implementation not in (None, "static", _OF_ASSISTANTS),
        "assistant_ensemble_weight is set": getattr(config, "assistant_ensemble_weight", None) is not None,
        "several processes generate together": bool(given.get("synced_gpus")),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _is_plain(ids: Any, given: dict[str, Any]) -> bool:
    """Whether each token's position is its place in the text."""
    import torch

    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if len(ids) != 1 or not ids.numel() or given.get("inputs_embeds") is not None:
        return False
    if mask is not None and not bool(mask.all()):
        return False
    places = torch.arange(ids.shape[1], device=ids.device)[None]
    return positions is None or (positions.shape == places.shape and bool((positions == places).all()))


def _assistant_reason(model: Any, assistant: Any) -> str | None:
    if not hasattr(assistant, "create_attention_masks"):
        return "the assistants of this release of transformers make their masks in another way"
    here, there = ((one.device, one.dtype) for one in (model, assistant))
    return None if here == there else f"the assistant is {there[1]} on {there[0]}, the model {here[1]} on {here[0]}"
