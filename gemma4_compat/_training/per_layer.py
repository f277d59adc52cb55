"""Per-layer inputs of E2B and E4B without a gradient for the input embeddings, which nobody reads.

Checkpointing and k-bit training have the embeddings of tokens require a gradient (``enable_input_require_grads``), so
that there is a graph. The table is frozen, so this gradient goes nowhere. But the per-layer inputs are computed from
these embeddings, and so autograd keeps what their projection and its norm need, and adds up a gradient of all layers'
inputs. Both have the size of all per-layer inputs: 0.66 GiB each, in bfloat16, for 32,768 tokens of an E4B.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from gemma4_compat._engine.runtime import in_place
from gemma4_compat._gemma4.accelerate import attached
from gemma4_compat._training import modules

ATTRIBUTE = attached.PER_LAYER_TOKENS
LOOKED_UP = attached.LOOKED_UP
#: Whose hooks on an embedding do no more than to have its outputs require a gradient.
_LIBRARIES = ("transformers.", "peft.", "gemma4_compat.")


def ask(model: Any, tokens: int) -> None:
    """Have per-layer inputs computed without a graph in training with more than ``tokens`` tokens."""
    for text in found(model):
        setattr(text, ATTRIBUTE, tokens)
        in_place.replace(text, "project_per_layer_inputs", functools.partial(project, text))
        modules.replace_forward(text.embed_tokens, functools.partial(look_up, text.embed_tokens))


def leave(model: Any) -> None:
    """Undo :func:`ask`."""
    for text in found(model):
        vars(text).pop(ATTRIBUTE, None)
        in_place.restore(text, "project_per_layer_inputs", project)
        modules.restore_forward(text.embed_tokens, look_up)


def found(model: Any) -> Iterator[Any]:
    """The text models in ``model`` that have per-layer inputs."""
    return (
        module
        for module in model.modules()
        if type(module).__name__ == "Gemma4TextModel"
        and getattr(module, "hidden_size_per_layer_input", None)
        and hasattr(module, "project_per_layer_inputs")
    )


def look_up(embedding: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The forward of the table of tokens: marks what it looked up if nothing trains it."""
    states = original(*args, **kwargs)
    if embedding.training and not states.requires_grad:
        setattr(states, LOOKED_UP, True)
    return states


def project(text: Any, original: Callable[..., Any], inputs_embeds: Any, *args: Any, **kwargs: Any) -> Any:
    """``project_per_layer_inputs``: (rows, tokens, layers, features), without a graph if nobody reads its gradient."""
    tokens = vars(text).get(ATTRIBUTE)
    many = tokens is not None and modules.trains(text) and inputs_embeds.shape[:-1].numel() > tokens
    if many and modules.is_on(text, "TextModel") and _is_unread(text, inputs_embeds):
        inputs_embeds = inputs_embeds.detach()
    return original(inputs_embeds, *args, **kwargs)


def _is_unread(text: Any, inputs_embeds: Any) -> bool:
    """Whether only a library had looked-up embeddings require a gradient, and no weight on the way is trained."""
    hooks = text.embed_tokens._forward_hooks.values()
    return (
        getattr(inputs_embeds, LOOKED_UP, False)
        and inputs_embeds.is_leaf
        and all(str(getattr(hook, "__module__", "")).startswith(_LIBRARIES) for hook in hooks)
        and not modules.trained(text.per_layer_model_projection)
        and not modules.trained(text.per_layer_projection_norm)
    )
