"""Sliding layers of models without KV-shared layers (12B, 26B-A4B, 31B) cache no more than their window.

Symptom: silent: the cache of the 12B, the 26B-A4B and the 31B grows with the context even in the sliding layers. Five
of six layers attend only to the last 1024 tokens, but keep all of them. The outputs are right, but a long context does
not fit where it should.

Cause: ``DynamicCache.__init__`` takes the layer types from ``layer_types[:-num_kv_shared_layers]``. These models
share nothing, so that is ``[:-0]``: no layers. The cache then creates its layers on first use, and treats each one
as a full attention layer.

Fix: For Gemma 4 models without KV-shared layers, the cache is built from a view of the configuration that does not
mention KV-shared layers. The outputs are the same.

The patch is limited to Gemma 4, because a sliding layer that has dropped tokens beyond its window can no longer be
cropped. On such models, assisted decoding with the caller's own cache used to work without an error. For Gemma 4, the
separate patch for the cache of assisted generation takes care of that.

Remove when: transformers below 5.14.0 is no longer supported.
"""

from typing import Any

from gemma4_compat._gemma4.cache.shared_kv import Unshared, shares_nothing
from gemma4_compat._gemma4.models.family import is_gemma4_config
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F24",
    severity="memory",
    affected=">=5.5.0,<5.14.0",
    applied_upstream="pull/47118",
    needs="transformers-assisted-cache transformers-vision-masks",
)

_CONTEXT = 200


@PATCH.replaces("transformers.cache_utils", "DynamicCache.__init__")
def dynamic_cache(
    original: Original, self: Any, ddp_cache_data: Any = None, config: Any = None, *args: Any, **kwargs: Any
) -> Any:
    if config is not None and is_gemma4_config(config) and shares_nothing(config):
        config = Unshared(config)
    return original(self, ddp_cache_data, config, *args, **kwargs)


def reproduce(workspace: Workspace) -> Outcome:
    import torch

    model = workspace.load_31b()
    text = model.config.get_text_config()
    prompt = torch.arange(_CONTEXT, device=workspace.main).remainder(200).unsqueeze(0) + 3
    with torch.no_grad():
        cache = model(prompt).past_key_values
        model(prompt[:, :1], past_key_values=cache)
    sliding = [layer for layer, kind in zip(cache.layers, text.layer_types) if kind == "sliding_attention"]
    held = max(layer.keys.shape[-2] for layer in sliding)
    size = sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))
    return Outcome(
        held > text.sliding_window,
        f"after {_CONTEXT + 1} tokens the cache has {size} bytes: {len(sliding)} of {len(cache.layers)} layers, "
        f"with a window of {text.sliding_window}, hold {held} tokens each",
    )
