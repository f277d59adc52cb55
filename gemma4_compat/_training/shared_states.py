"""Keys and values that layers share, while checkpointing computes again the layer that stores them.

Such a layer writes its keys and values to a mapping, ``shared_kv_states``. Computed again in the backward pass, it
writes them again, with the graph that computed them. The mapping lives until the backward pass ends, and so does all
that this graph keeps: the layer's inputs, outputs of its norms, projections. Nobody reads them, for the layers that
would are done. Here the mapping keeps the keys and values of the forward pass.

A layer that transformers checkpoints has a mapping of its own (``transformers-checkpointed-states``), and this saves
nothing more; only this serves layers in another checkpoint, such as torch's ``CheckpointWrapper``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from gemma4_compat._offload import torch_internals
from gemma4_compat._training import modules


def ask(model: Any, _tokens: int) -> None:
    """Have the layers of ``model`` that store keys and values for others store them in the forward pass only."""
    for attention in found(model):
        modules.replace_forward(attention, forward)


def leave(model: Any) -> None:
    """Undo :func:`ask`."""
    for attention in found(model):
        modules.restore_forward(attention, forward)


def found(model: Any) -> Iterator[Any]:
    """The attention modules in ``model`` that store keys and values for other layers."""
    return (
        module
        for module in model.modules()
        if type(module).__name__.endswith("TextAttention") and getattr(module, "store_full_length_kv", False)
    )


def forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """An attention's forward; in a backward pass, what ``shared_kv_states`` has stays."""
    states = kwargs.get("shared_kv_states")
    if not states or torch_internals.graph_task() == -1:
        return original(*args, **kwargs)
    before = dict(states)
    outputs = original(*args, **kwargs)
    for key, value in before.items():
        states[key] = value
    return outputs
