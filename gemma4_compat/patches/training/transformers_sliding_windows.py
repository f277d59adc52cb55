"""Sliding layers compute long texts window by window.

Symptom: silent: long prompts and training on long texts are slow, and take memory by the square of the length.

Cause: A token of a sliding layer sees the 512 or 1,024 tokens up to its own, and four or five of six layers slide. But
``sdpa_attention_forward`` computes attention over all pairs of tokens, with a mask that hides most of them.

Fix: ``sdpa`` is given a block of queries with only the keys near it, and its part of the mask. The mask decides,
so padding, packed sequences, images whose tokens attend to each other, caches and chunked prefill work as well. A mask
that shows more than the window is left to one call. Blocks begin at the tiles of kernels, so that results keep
their bits. Without gradients, the first call of a shape computes both ways; unless the bits are equal, that shape is
always left to one call. In training, gradients of keys and values are sums in another order, with an error that is not
larger; so training needs ``GEMMA4_COMPAT_ENABLE=transformers-sliding-windows``, which also leaves out the comparison.
Used from where at most half of the scores remains (2,048 tokens with a window of 512); on GPUs from 16,384 tokens.

Remove when: transformers computes the sliding layers of Gemma 4 by windows with ``sdpa``.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gemma4_compat._attention import attention_lookup, block_layout, layers, windows
from gemma4_compat._engine import sleep
from gemma4_compat._engine.patch import ActsOn, Kind, Outcome, Patch, Severity, Target

if TYPE_CHECKING:
    from gemma4_compat._reproduction.workspace import Workspace


def attention_function(original: Callable[..., Any], self: Any, key: str | None, *default: Any) -> Any:
    import torch

    found = original(self, key, *default)
    return found if key != "sdpa" or torch.compiler.is_compiling() else windows.over(found)


def implementation(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """What a model is made with, or given later: from the first Gemma 4 on, layers ask for a function of ours."""
    if _is_gemma4(getattr(self, "config", None)):
        sleep.awaken(windows.ID)
    return original(self, *args, **kwargs)


def _is_gemma4(config: Any) -> bool:
    return str(getattr(config, "model_type", "")).startswith("gemma4")


def _sleeps(late: bool) -> bool:
    """Whether there is no Gemma 4 yet. Where models may have been made before, all configurations are looked at."""
    kind = sys.modules["transformers.configuration_utils"].PreTrainedConfig
    return not (late and any(issubclass(type(item), kind) and _is_gemma4(item) for item in gc.get_objects()))


def reproduce(workspace: Workspace) -> Outcome:
    """Which part of the scores of sliding layers is computed, by a prompt of the length that the patch is for."""
    import os
    from unittest import mock

    import torch

    model = workspace.load_text()
    length = max(windows.LEAST.get(torch.device(workspace.main).type, windows.LEAST_ON_GPU), 4 * block_layout.UNIT)
    ids = torch.randint(3, 240, (1, length), generator=torch.Generator().manual_seed(1)).to(workspace.main)
    sliding = [module for module in model.modules() if getattr(module, "is_sliding", False) and layers.is_text(module)]
    kept = torch.nn.functional.scaled_dot_product_attention
    scores = 0

    def attention(query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal scores
        if query.shape[3] == sliding[0].head_dim:
            scores += query[..., 0].numel() * key.shape[2]
        return kept(query, key, *args, **kwargs)

    enabled = {"GEMMA4_COMPAT_ENABLE": windows.ID}
    with torch.no_grad(), mock.patch.dict(os.environ, enabled):
        torch.nn.functional.scaled_dot_product_attention = attention
        try:
            model(input_ids=ids, use_cache=False)
        finally:
            torch.nn.functional.scaled_dot_product_attention = kept
    whole = len(sliding) * model.config.get_text_config().num_attention_heads * length**2
    return Outcome(
        2 * scores > whole,
        f"{length:,} tokens: sliding layers compute {100 * scores / whole:.0f}% of the scores of all pairs",
    )


PATCH = Patch(
    id=windows.ID,
    kind=Kind.SPEED,
    severity=Severity.SPEED,
    failure_points=("F104",),
    distribution="transformers",
    affected=">=5.5.0",
    acts_on=ActsOn.GEMMA4,
    targets=(
        Target(
            module="transformers.modeling_utils",
            name="PreTrainedModel._check_and_adjust_attn_implementation",
            replacement=implementation,
            waker=True,
        ),
        *attention_lookup.targets(attention_function, asleep=_sleeps),
    ),
    reproduce=reproduce,
    after=("transformers-cudnn-padding",),  # the sdpa that blocks run is the repaired one
)
