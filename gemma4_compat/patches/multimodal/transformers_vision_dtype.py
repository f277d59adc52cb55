"""A quantized vision tower works with an ``embed_vision`` that is not quantized.

Symptom: ``RuntimeError: expected m1 and m2 to have the same dtype, but got: float != c10::BFloat16`` (``mat1 and
mat2`` on a GPU) for an image, if the vision tower is quantized and the multimodal embedder after it,
``embed_vision``, is not.

Cause: The processor's ``pixel_values`` are float32. An unquantized tower casts them to the dtype of its weights.
Since transformers 5.13 a quantized tower leaves them as they are, so its features are float32.
``Gemma4MultimodalEmbedder.forward`` does not cast its input.

Fix: ``embed_vision`` gets the features in the dtype of its weight. Under autocast nothing is cast, because autocast
does it. A quantized ``embed_vision`` is not affected either. ``embed_audio`` has the same class, so its input is cast
in the same way.

Remove when: transformers casts the pixel values of a quantized vision tower, or the features after it (in
``embed_vision``).
"""

from typing import Any

from gemma4_compat._gemma4.models import autocast
from gemma4_compat.patches.api import FORWARDS, MODELING_GEMMA4, Original, Outcome, Patch, Workspace

PATCH = Patch("F9", severity="crash", affected=">=5.13.0", requires="bitsandbytes")


@PATCH.replaces(MODELING_GEMMA4, "Gemma4MultimodalEmbedder.forward")
def forward(original: Original, self: Any, inputs_embeds: Any, *args: Any, **kwargs: Any) -> Any:
    dtype = self.embedding_projection.weight.dtype
    if inputs_embeds.dtype != dtype and dtype.is_floating_point and autocast.dtype_on(inputs_embeds.device) is None:
        inputs_embeds = inputs_embeds.to(dtype)
    return original(self, inputs_embeds, *args, **kwargs)


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._lab import tiny
    from gemma4_compat._lab.scenarios import features

    workspace.needs("vision_tower")
    skipped = ["lm_head", "model.embed_vision", "model.embed_audio"]
    model = tiny.load(workspace.checkpoint, "4bit", device=workspace.main, towers=True, skip_modules=skipped)
    batch = workspace.inputs()
    # What a user would do: cast what comes out of the tower.
    hook = model.model.embed_vision.embedding_projection.register_forward_pre_hook(
        lambda module, inputs: tuple(value.to(module.weight.dtype) for value in inputs)
    )
    reference = features(model, batch, "vision")
    hook.remove()
    same = all(reference.equal(features(model, batch, "vision")) for _ in range(FORWARDS))
    said = f"a float32 image, a quantized tower, embed_vision in bf16: {'the same' if same else 'other'} features"
    return Outcome(not same, said, 0.0 if same else None)
