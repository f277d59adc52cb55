"""silent: the cache of the 26B-A4B and the 31B grows with the context in all layers, five of six of which look at no
more than the last 1024 tokens. The answers are right; a long context does not fit where it should.

Why: as in ``transformers_static_cache.py``. A ``DynamicCache`` that was told ``layer_types[:-0]``, no layers, makes
them as they are asked for, and takes each for one of full attention.

Here: as there, for Gemma 4 only: the answers are the same, but a layer that has forgotten what is behind its window
cannot be cropped any more, which assisted decoding with a cache of one's own did on such models without a complaint.
``transformers_assisted_cache.py`` sees to that for Gemma 4.

Goes when transformers below 5.14.0 is no longer supported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gemma4_compat._engine.patch import Outcome, Patch, Severity, Target
from gemma4_compat._models.cache_config import Unshared, shares_nothing
from gemma4_compat._models.family import is_gemma4_config

if TYPE_CHECKING:
    from gemma4_compat._reproduction.workspace import Workspace

_CONTEXT = 200


def dynamic_cache(
    original: Callable[..., Any], self: Any, ddp_cache_data: Any = None, config: Any = None, *args: Any, **kwargs: Any
) -> Any:
    if config is not None and is_gemma4_config(config) and shares_nothing(config):
        config = Unshared(config)
    return original(self, ddp_cache_data, config, *args, **kwargs)


def reproduce(workspace: Workspace) -> Outcome:
    import torch

    from gemma4_compat._reproduction import tiny

    checkpoint = workspace.made(tiny.build_checkpoint, text_variant="31B")
    model = tiny.load(checkpoint, device=workspace.main)
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


PATCH = Patch(
    id="transformers-sliding-cache",
    summary="sliding layers of models without KV-shared layers (26B-A4B, 31B) keep no more than their window",
    symptom="silent: the cache grows with the context in the sliding layers too",
    severity=Severity.MEMORY,
    failure_points=("F24",),
    distribution="transformers",
    affected=">=5.5.0,<5.14.0",
    measured="5.13.1",
    fixed="5.14.0",
    applied_upstream="https://github.com/huggingface/transformers/pull/47118",
    retire_when="transformers below 5.14.0 is no longer supported",
    targets=(
        Target(
            module="transformers.cache_utils",
            name="DynamicCache.__init__",
            replacement=dynamic_cache,
            known={
                "68a932b5ff56": "5.5.0 - 5.7.0",
                "c012e8e65de3": "5.8.0 - 5.13.1",
            },
        ),
    ),
    reproduce=reproduce,
)
