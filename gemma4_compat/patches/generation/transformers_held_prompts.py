"""A prompt that a given cache holds already is refused.

Symptom: silent: ``generate(..., past_key_values=cache)`` with a prompt that is not longer than what the cache holds,
for instance to have the last answer written again, returns other tokens than without the cache.

Cause: ``GenerationMixin._prefill`` reads the last ``length - held`` tokens as ``input_ids[:, -(length - held):]``. For
nothing new that is ``[:, -0:]``: all of the prompt once more, after what the cache holds. For less it is a part of it.

Fix: For Gemma 4 this is one clear error, before anything is read: sliding layers may have dropped what a shorter text
needs, so the cache cannot be cut for the caller.

Remove when: transformers refuses such a prompt, or reads it right.
"""

from typing import Any

from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.cache import cache_names
from gemma4_compat._gemma4.cache import prefill as prefill_of
from gemma4_compat._gemma4.models.family import is_gemma4_config
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F107",
    severity="wrong_result",
    affected=">=5.5",
    after="transformers-chunked-media transformers-chunked-images transformers-chunked-turns",
)


@PATCH.replaces("transformers.generation.utils", "GenerationMixin._prefill")
def prefill(
    original: Original,
    self: Any,
    input_ids: Any,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    is_first_iteration: bool = True,
    **kwargs: Any,
) -> Any:
    cache = cache_names.cache_in(model_kwargs)
    if is_first_iteration and cache is not None and is_gemma4_config(self.config):
        length = input_ids.shape[1]
        if model_kwargs.get("inputs_embeds") is None and length:
            new = prefill_of.new_tokens(input_ids, generation_config, model_kwargs)
            if new <= 0:
                raise prefill_of.nothing_new(length - new, length)
    return original(self, input_ids, generation_config, model_kwargs, is_first_iteration, **kwargs)


def reproduce(workspace: Workspace) -> Outcome:
    import torch

    from gemma4_compat._lab import tiny

    model = workspace.load().float()
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    first = model.generate(**tiny.inputs(workspace.main, text_only=True), **options)
    ids = first.sequences[:, : int(first.past_key_values.get_seq_length())]
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(**batch, **options)
    try:
        found = model.generate(**batch, **options, past_key_values=first.past_key_values)
    except Gemma4CompatError as error:
        return Outcome(False, str(error))
    off = (expected.logits[0] - found.logits[0]).abs().max().item()
    return Outcome(off > 1e-3, f"a prompt that the cache holds: its logits are off by {off:.2g}")
