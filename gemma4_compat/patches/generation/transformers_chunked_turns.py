"""A prompt that is read in chunks continues a cache that is given.

Symptom: silent: with ``prefill_chunk_size``, a second turn on the returned cache (``past_key_values=``) gives other
tokens than without chunks: the logits are those of a conversation that is in the cache twice.

Cause: ``GenerationMixin._prefill`` leaves out what the cache holds only if a prompt is read at once. In chunks it
reads all of it again, at positions that begin with 0, after what the cache holds.

Fix: For Gemma 4, only what is new is read in chunks, at its own positions: each chunk as transformers reads new tokens
that are given without those before.

Remove when: transformers below 5.21.0 is no longer supported.
"""

import copy
from typing import Any

from gemma4_compat._gemma4.cache import cache_names
from gemma4_compat._gemma4.cache import prefill as prefill_of
from gemma4_compat._gemma4.models.family import is_gemma4_config
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F24",
    severity="wrong_result",
    affected=">=5.5.0,<5.21.0",
    applied_upstream="releases/tag/v5.21.0",
    after="transformers-chunked-media transformers-chunked-images",
)

_MEDIA = ("pixel_values", "pixel_values_videos", "input_features")
#: Arguments with a column for each token, up to the last one.
_BY_POSITION = ("attention_mask", "position_ids", "mm_token_type_ids", "token_type_ids")


@PATCH.replaces("transformers.generation.utils", "GenerationMixin._prefill")
def prefill(
    original: Original,
    self: Any,
    input_ids: Any,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    size, cache = generation_config.prefill_chunk_size, cache_names.cache_in(model_kwargs)
    held = int(cache.get_seq_length()) if size is not None and cache is not None else 0
    if not held or not is_gemma4_config(self.config) or model_kwargs.get("inputs_embeds") is not None:
        return original(self, input_ids, generation_config, model_kwargs, *args, **kwargs)
    new = prefill_of.new_tokens(input_ids, generation_config, model_kwargs)
    config = copy.copy(generation_config)
    config.prefill_chunk_size = None
    sizes = [size] * -(-new // size) if isinstance(size, int) else list(size)
    if len(sizes) < 2:
        return original(self, input_ids, config, model_kwargs, *args, **kwargs)
    if any(model_kwargs.get(name) is not None for name in _MEDIA) or model_kwargs.get("mm_encoder_outputs"):
        # refused there, with a reason
        return original(self, input_ids, generation_config, model_kwargs, *args, **kwargs)
    outputs, start = None, 0
    for length in sizes:
        end = min(start + length, new)
        given = dict(model_kwargs)
        for name in _BY_POSITION:
            if given.get(name) is not None:
                given[name] = given[name][..., : given[name].shape[-1] - (new - end)]
        config._mask_length = held + end  # where there is no mask
        ids = input_ids[:, input_ids.shape[1] - new + start : input_ids.shape[1] - new + end]
        outputs = original(self, ids, config, given, *args, **kwargs)
        start = end
    return outputs


def reproduce(workspace: Workspace) -> Outcome:
    import torch

    from gemma4_compat._lab import tiny

    model = workspace.load().float()
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    first = model.generate(**tiny.inputs(workspace.main, text_only=True), **options)
    ids = torch.cat([first.sequences, first.sequences[:, 3:12]], dim=-1)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(**batch, **options)
    found = model.generate(**batch, **options, past_key_values=first.past_key_values, prefill_chunk_size=4)
    off = (expected.logits[0] - found.logits[0]).abs().max().item()
    rounding = 1e-4 * expected.logits[0].abs().max().item()  # float32, other kernels for other lengths
    return Outcome(off > rounding, f"a second turn that is read in chunks: its logits are off by {off:.2g}")
