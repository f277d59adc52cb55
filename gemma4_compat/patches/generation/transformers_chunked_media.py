"""Prefill in chunks never leaves out images, videos and audio.

Symptom: silent: with ``prefill_chunk_size`` the model ignores images, videos and audio. Its outputs are those for a
prompt with placeholders in their place.

Cause: ``GenerationMixin._prefill`` prepares each chunk of the prompt as if it were a later decoding step, which no
longer needs any media.

Fix: For Gemma 4, a prompt with media that fits into one chunk is not cut. One that would have to be cut is refused
with a clear error. From 5.23.0 on, transformers itself reads images in chunks and refuses a prompt with audio that
would have to be cut. Text-only prompts are still read in chunks.

Remove when: transformers below 5.23.0 is no longer supported.
"""

import copy
from typing import Any

from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.models.family import is_gemma4_config
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F24", severity="wrong_result", affected=">=5.5.0,<5.23.0", applied_upstream="releases/tag/v5.23.0")

#: The caller's argument -> the name under which transformers from 5.20.0 on encodes it before the first chunk
#: (``mm_encoder_outputs``; audio is passed on unchanged).
_MEDIA = (
    ("images", "pixel_values", "image"),
    ("videos", "pixel_values_videos", "video"),
    ("sounds", "input_features", "audio"),
)


def _media(model_kwargs: dict[str, Any]) -> list[str]:
    encoded = model_kwargs.get("mm_encoder_outputs") or {}
    return [
        kind for kind, given, name in _MEDIA if model_kwargs.get(given) is not None or encoded.get(name) is not None
    ]


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
    size = generation_config.prefill_chunk_size
    media = _media(model_kwargs)
    if size is not None and media and is_gemma4_config(self.config):
        if input_ids.shape[-1] > size:
            raise Gemma4CompatError(
                f"a prompt of {input_ids.shape[-1]} tokens with {' and '.join(media)} cannot be read in chunks of "
                f"prefill_chunk_size={size}: this transformers would leave them out; set prefill_chunk_size=None"
            )
        generation_config = copy.copy(generation_config)
        generation_config.prefill_chunk_size = None
    return original(self, input_ids, generation_config, model_kwargs, *args, **kwargs)


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._lab import tiny

    model, batch = workspace.load().float(), workspace.inputs()
    sounds = {"only sounds": tiny.without(batch, "image")} if "input_features" in batch else {}
    found = {"only images": tiny.without(batch, "input_features"), **sounds, "all": batch}
    outcomes = [_compare(model, media, name) for name, media in found.items()]
    defects = [outcome for outcome in outcomes if outcome.defect]
    return Outcome(
        bool(defects),
        "; ".join(outcome.detail for outcome in defects or outcomes[-1:]),
        max(outcome.parity or 0.0 for outcome in outcomes),
    )


def _compare(model: Any, batch: dict[str, Any], media: str) -> Outcome:
    options = {"max_new_tokens": 2, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    expected, found = (
        model.generate(**batch, **options, prefill_chunk_size=size) for size in (None, batch["input_ids"].shape[1])
    )
    off = (expected.logits[0] - found.logits[0]).abs().max().item()
    try:
        chunked = model.generate(**batch, **options, prefill_chunk_size=8)
        wrong = (expected.logits[0] - chunked.logits[0]).abs().max().item()
        said = f"in several they are off by {wrong:.2g}"
    except (Gemma4CompatError, ValueError):  # ours, and transformers'
        wrong, said = 0.0, "more than one is refused"
    rounding = 1e-4 * expected.logits[0].abs().max().item()  # float32, other kernels for other lengths
    return Outcome(off > 0 or wrong > rounding, f"{media}: in one chunk the logits are off by {off:.2g}; {said}", off)
