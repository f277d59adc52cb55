"""Assisted generation and prompt lookup work past the sliding window.

Symptom: ``ValueError: Cannot `crop` a `DynamicSlidingWindowLayer` after it has seen more tokens than its sliding
window`` from assisted generation and prompt lookup.

Cause: Candidate tokens that the model rejects are removed from the cache again, and a sliding layer has already
discarded what that needs. So ``generate`` creates a cache that keeps everything, ``"dynamic_full"``. In 5.12.0 to
5.13.1 ``_prepare_cache_for_generation`` also gave that cache sliding layers, for the model and for its assistant.
Before 5.15.0, a ``DynamicCache`` that the caller created from the configuration never keeps everything.

Fix: Before the first token, the patch replaces the sliding layers of a Gemma 4 model's cache for assisted generation
with layers that keep everything, including their contents. The outputs are the same; the cache grows with the context.
A cache that has already discarded tokens is refused with a clear error and stays unchanged.

Remove when: transformers below 5.15.0, where sliding layers cannot be cropped, is no longer supported.
"""

from typing import Any

from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.models.family import is_gemma4_config
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F24", severity="crash", affected=">=5.5.0,<5.15.0", bug="issues/46629", applied_upstream="pull/47447")

_NAME = "past_key_values"


@PATCH.replaces("transformers.generation.utils", "GenerationMixin._prepare_cache_for_generation")
def prepare_cache(
    original: Original,
    self: Any,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    generation_mode: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    result = original(self, generation_config, model_kwargs, generation_mode, *args, **kwargs)
    cropped = generation_mode == "assisted_generation" or generation_config.cache_implementation == "dynamic_full"
    if cropped and is_gemma4_config(self.config) and model_kwargs.get(_NAME) is not None:
        keep_everything(model_kwargs[_NAME])
    return result


def keep_everything(cache: Any) -> None:
    """Replace the dynamic sliding layers of ``cache`` by layers of full attention that hold the same tokens.

    Raises:
        Gemma4CompatError: a layer has already dropped tokens; nothing has been changed.
    """
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    sliding = {index: layer for index, layer in enumerate(cache.layers) if type(layer) is DynamicSlidingWindowLayer}
    for layer in sliding.values():
        if layer.get_seq_length() >= layer.sliding_window:
            raise Gemma4CompatError(
                f"past_key_values holds {layer.get_seq_length()} tokens, and its sliding layers have forgotten all "
                f"but the last {layer.sliding_window - 1}, so assisted generation cannot take rejected tokens back; "
                "begin the text with past_key_values=DynamicCache() (without a config), or leave out past_key_values"
            )
    for index, layer in sliding.items():
        full = DynamicLayer()
        if layer.is_initialized:
            full.update(layer.keys, layer.values)
        cache.layers[index] = full


def reproduce(workspace: Workspace) -> Outcome:
    from transformers import DynamicCache

    from gemma4_compat._lab import tiny

    model = workspace.load().float()
    options = {**tiny.inputs(workspace.main, text_only=True), "max_new_tokens": 8, "do_sample": False}
    cache = DynamicCache(config=model.config)
    expected = model.generate(**options)
    found = model.generate(**options, prompt_lookup_num_tokens=2, past_key_values=cache)
    same = expected.equal(found)
    return Outcome(not same, f"prompt lookup gives {'the same' if same else 'other'} tokens")
