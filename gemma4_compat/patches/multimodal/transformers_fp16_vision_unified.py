"""Image input works in a float16 ``gemma4_unified`` model (the 12B).

Symptom: silent: in float16 the features of an image, and with them all logits of the prompt, are NaN in the 12B. It
answers with nothing, or with one token over and over.

Cause: ``patch_dense`` of ``Gemma4UnifiedVisionEmbedder`` multiplies 6,912 values of pixels, and its output can exceed
65504, the largest float16. ``patch_ln2``, a layer norm, turns the infinity into NaN. vLLM's users saw it with the
released weights on a card without bfloat16, where the model runs in float16
(https://github.com/vllm-project/vllm/issues/48231).

Fix: A layer norm does not depend on the scale of its input. Patches whose projection is too large for float16 are
projected again, divided by 64. All other patches, and other dtypes, keep their bits. A quantized, adapted or
offloaded ``patch_dense`` is repaired as well, and so is autocast.

Remove when: ``Gemma4UnifiedVisionEmbedder`` projects patches in float32 in a float16 model.
"""

from pathlib import Path
from typing import Any

from gemma4_compat._engine.runtime.views import PlainView
from gemma4_compat.patches.api import MODELING_UNIFIED, Original, Outcome, Patch, Workspace

PATCH = Patch("F25", severity="wrong_result", affected=">=5.10.1", after="transformers-quantized-vision-unified")

#: Bound for the image features' relative difference from float32. Measured: 0.0007; 0.007 in 8-bit.
BOUND = 0.01
#: A power of two, which rounds nothing but patches below 0.004; with 1,024 features were six times as far off.
_SCALE = 64.0


@PATCH.replaces(MODELING_UNIFIED, "Gemma4UnifiedVisionEmbedder.forward")
def embed(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    return original(PlainView(self, patch_dense=_PatchDense(self.patch_dense)), *args, **kwargs)


class _PatchDense(PlainView):
    """``patch_dense``, with finite outputs in float16: those that were infinite are divided by :data:`_SCALE`."""

    def __call__(self, patches: Any) -> Any:
        """``patches``: [..., patches, values]."""
        import torch

        found = self._of(patches)
        if found.dtype is not torch.float16:
            return found
        # One call: an offloaded weight comes once. The zeros give the bias, which must be divided as well.
        zeros = torch.zeros_like(patches[..., :1, :])
        again = self._of(torch.cat((patches / _SCALE, zeros), dim=-2))
        product, bias = again[..., :-1, :] - again[..., -1:, :], again[..., -1:, :]
        return torch.where(found.isfinite().all(-1, keepdim=True), found, product + bias / _SCALE)


def build_bright(folder: Path) -> None:
    """A 12B in which the projection of half the patches of the tiny image is beyond float16."""
    import torch

    from gemma4_compat._lab import tiny, tiny_models

    model = tiny.load(tiny_models.build_unified_checkpoint(folder), dtype=torch.float32)
    embedder = model.model.embed_vision
    with torch.no_grad():
        projected = embedder.patch_dense(embedder.patch_ln1(tiny.unified_inputs()["pixel_values"].float()))
        factor = 65504 / projected.abs().amax(-1).median()
        for parameter in embedder.patch_dense.parameters():
            parameter.mul_(factor)
    model.to(torch.float16).save_pretrained(folder)


def reproduce(workspace: Workspace) -> Outcome:
    import torch

    from gemma4_compat._lab import tiny
    from gemma4_compat._lab.scenarios import features, relative

    if workspace.unified() is None:
        return Outcome(False, "this release has no gemma4_unified", applicable=False)
    checkpoint = workspace.cached(build_bright)
    batch = tiny.unified_inputs(workspace.main)
    model = tiny.load(checkpoint, device=workspace.main, dtype=torch.float16)
    with torch.no_grad():
        if not model(**batch).logits.isfinite().all():
            return Outcome(True, "the logits of a prompt with an image are NaN")
    reference = tiny.load(checkpoint, device=workspace.main, dtype=torch.float32)
    found = relative(features(model, batch, "vision"), features(reference, batch, "vision"))
    return Outcome(not found < BOUND, f"image features in float16 are those of float32, to {found:.2g}")
