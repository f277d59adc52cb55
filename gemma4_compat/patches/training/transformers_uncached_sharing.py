"""KV-shared layers still share keys and values without a cache and under gradient checkpointing.

Symptom: silent: on transformers 5.5.0 and 5.5.1, ``use_cache=False`` and gradient checkpointing (of either kind)
give different logits, and a training loss and gradients that belong to no Gemma 4 model.

Cause: In these releases ``Gemma4TextAttention.forward`` of a KV-shared layer reads the keys and values of an earlier
layer from the cache. Without a cache (checkpointing removes it), each of these layers computes its own, with weights
that were never trained.

Fix: ``Gemma4TextModel.forward`` creates a container for the shared keys and values, as upstream does from 5.5.2 on,
and a layer that gets no cache shares through it. A checkpoint keeps only a copy, which its layer does not write to.
Logits without a cache equal those with a cache bit for bit.

Remove when: transformers below 5.5.2 is no longer supported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gemma4_compat._engine.patch import ActsOn, Kind, Outcome, Patch, Severity, Target
from gemma4_compat._models import shared_kv

if TYPE_CHECKING:
    from gemma4_compat._reproduction.workspace import Workspace

_NAME = "shared_kv_states"
_GEMMA4 = "transformers.models.gemma4.modeling_gemma4"


class _NoCache:
    """The part of a cache that attention needs to share keys and values; it stores nothing else."""

    def __init__(self, states: Any) -> None:
        self.shared_layers = states

    def update(self, keys: Any, values: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        return keys, values


def text_model(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    if self.config.num_kv_shared_layers:
        kwargs[_NAME] = shared_kv.SharedStates({})  # passed on to every layer with the remaining arguments
    return original(self, *args, **kwargs)


def attention(
    original: Callable[..., Any],
    self: Any,
    hidden_states: Any,
    position_embeddings: Any,
    attention_mask: Any,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Any:
    states = kwargs.pop(_NAME, None)
    if past_key_values is None and states is not None:
        past_key_values = _NoCache(states)
    return original(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)


def reproduce(workspace: Workspace) -> Outcome:
    import torch

    model, batch = workspace.load(), workspace.inputs()
    with torch.no_grad():
        cached, uncached = (model(**batch, use_cache=use_cache).logits for use_cache in (True, False))
    found = (cached - uncached).abs().max().item()
    return Outcome(found > 0, f"without a cache the logits differ by {found:.3g} from those with one", found)


PATCH = Patch(
    id="transformers-uncached-sharing",
    kind=Kind.REPAIR,
    severity=Severity.WRONG_RESULT,
    failure_points=("F19",),
    distribution="transformers",
    affected=">=5.5.0,<5.5.2",
    acts_on=ActsOn.GEMMA4,
    fixed="5.5.2",
    bug=("https://github.com/huggingface/transformers/issues/45242",),
    applied_upstream="https://github.com/huggingface/transformers/pull/45312",
    targets=(
        Target(module=_GEMMA4, name="Gemma4TextModel.forward", replacement=text_model),
        Target(module=_GEMMA4, name="Gemma4TextDecoderLayer.__call__", replacement=shared_kv.checkpointed_layer),
        Target(module=_GEMMA4, name="Gemma4TextAttention.forward", replacement=attention),
    ),
    reproduce=reproduce,
)
