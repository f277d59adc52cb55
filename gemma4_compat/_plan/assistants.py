"""What an assistant takes: its weights, and the memory of speculative steps (``decode_fast(assistants=True)``)."""

from __future__ import annotations

from dataclasses import replace

from gemma4_compat._generation.speculative import draft_length, speculative_steps
from gemma4_compat._memory.blueprint import Blueprint, rounded
from gemma4_compat._memory.formulas import MEASURED, Load

#: Width of the assistants of models with per-layer inputs (E2B, E4B) and of the others, and of their MLP for each of
#: these. The released configurations could not be read here: with four layers, the last one with full attention, these
#: widths give the 78 million weights that pages state for E2B's assistant and the 470 million for 31B's.
_WIDTHS, _OF_MLP, _SLIDING = (256, 1024), 8, 3
#: Groups of tokens, by which the smaller ones choose what to compute logits of.
_CENTROIDS = 2048


def exist() -> bool:
    """Whether the installed transformers has assistants for Gemma 4."""
    import transformers

    return hasattr(transformers, "Gemma4AssistantForCausalLM")


def class_of(model_class: str) -> str:
    """The name of the assistants' class in ``transformers`` for models of this class."""
    kind = model_class.removesuffix("ForConditionalGeneration").removesuffix("ForCausalLM")
    return f"{kind}AssistantForCausalLM"


def unsupported_reason(blueprint: Blueprint) -> str:
    """Why texts with an assistant are not decoded in speculative steps by replay; empty if they are."""
    layers = (block for block in blueprint.blocks if block.kind == "layer")
    is_plain = blueprint.experts is not None and not all(layer.experts for layer in layers)
    return "the model has experts that are not in 4 bits" if is_plain else ""


def weights(blueprint: Blueprint) -> int:
    """Bytes of the released assistant's weights for a model of this shape, in bf16."""
    small = bool(blueprint.per_layer_width)
    width, attentions = _WIDTHS[not small], [block.attention for block in blueprint.layers if block.attention]
    found = width * (blueprint.vocabulary + 3 * blueprint.hidden)  # tied embeddings, and the projections
    for full, layers in ((False, _SLIDING), (True, 1)):
        last = [one for one in attentions if (one.window is None) == full][-1:]
        heads = sum(one.heads * one.head_dim for one in last)
        found += layers * width * (2 * heads + 3 * _OF_MLP * width)
    if small:
        found += _CENTROIDS * width + 4 * blueprint.vocabulary  # the order of tokens takes 8 bytes each
    return 2 * found


def rows(blueprint: Blueprint) -> int:
    """Bytes in graphs for the tokens of a speculative step after the first, and for the random numbers of sampling.

    The logits of each token, of the assistant as well, are most of it; the graph of each number of drafts has its own
    random numbers, a row for each token, and those of two speculative steps are drawn before.
    """
    logits = speculative_steps.MAX_TOKENS * MEASURED.logits * blueprint.vocabulary
    drawn = 4 * speculative_steps.MAX_TOKENS + sum(2 * count + 1 for count in draft_length.COUNTS)
    return logits + 4 * drawn * blueprint.vocabulary


def beside(load: Load, blueprint: Blueprint) -> Load:
    """The load with an assistant for this model."""
    drafts = 0 if unsupported_reason(blueprint) else rows(blueprint)
    return replace(load, assistant=rounded(weights(blueprint)), drafts=drafts)
