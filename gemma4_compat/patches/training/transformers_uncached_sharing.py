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

from typing import Any

from gemma4_compat._gemma4.cache import shared_kv
from gemma4_compat.patches.api import MODELING_GEMMA4, Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F19", severity="wrong_result", affected=">=5.5.0,<5.5.2", bug="issues/45242", applied_upstream="pull/45312"
)

_NAME = "shared_kv_states"


class _NoCache:
    """The part of a cache that attention needs to share keys and values; it stores nothing else."""

    def __init__(self, states: Any) -> None:
        self.shared_layers = states

    def update(self, keys: Any, values: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        return keys, values


@PATCH.replaces(MODELING_GEMMA4, "Gemma4TextModel.forward")
def text_model(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    if self.config.num_kv_shared_layers:
        kwargs[_NAME] = shared_kv.SharedStates({})  # passed on to every layer with the remaining arguments
    return original(self, *args, **kwargs)


@PATCH.replaces(MODELING_GEMMA4, "Gemma4TextAttention.forward")
def attention(
    original: Original,
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


PATCH.replaces(MODELING_GEMMA4, "Gemma4TextDecoderLayer.__call__")(shared_kv.checkpointed_layer)
