"""Image input works on a quantized ``gemma4_unified`` model (the 12B).

Symptom: ``RuntimeError: mixed dtype (CPU): expect parameter to have scalar type of Float`` in ``patch_ln1`` of
``Gemma4UnifiedVisionEmbedder`` (on a GPU ``expected scalar type Float but found BFloat16``), as soon as a quantized
``gemma4_unified`` model gets an image.

Cause: The 12B has no vision tower. ``Gemma4UnifiedVisionEmbedder.forward`` projects patches of pixels to the width
of the model, and first casts them to ``patch_dense.weight.dtype``. In a quantized model this dtype is ``uint8`` or
``int8``. From 5.13 on, upstream does not cast to such a dtype, and the pixels stay float32, as the processor creates
them. In both cases the norm before the linear layer is bfloat16.

Fix: Upstream's function runs with a stand-in for the linear layer, which reports the dtype of the unquantized
parameters next to it. The unquantized model casts to the same dtype. The result matches the dequantized weights up to
the rounding of the quantized kernels; it is not bit-exact.

Before 5.13 the second linear layer that an image passes, in ``Gemma4UnifiedMultimodalEmbedder``, has the same defect.
The patch for quantized audio of ``gemma4_unified`` fixes it.

Remove when: ``Gemma4UnifiedVisionEmbedder`` casts the pixels of a quantized model to the dtype of its norms
(``patch_ln1``).
"""

from typing import Any

from gemma4_compat._gemma4.models import compute_dtype
from gemma4_compat.patches.api import MODELING_UNIFIED, Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F9 F30",
    severity="crash",
    affected=">=5.10.1",
    bug="issues/46899",
    requires="bitsandbytes",
    needs="transformers-quantized-audio-unified",
)

#: As in ``transformers_quantized_vision.py``. Two linears magnify less than a tower: 0.006 in 4-bit, 0.009 in 8-bit.
BOUND = 0.05


@PATCH.replaces(MODELING_UNIFIED, "Gemma4UnifiedVisionEmbedder.forward")
def vision_embedder(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    return original(compute_dtype.for_quantized(self, self.pos_embedding.dtype, "patch_dense"), *args, **kwargs)


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._lab.scenarios import compare_quantized_tower

    unified = workspace.unified()
    if unified is None:
        return Outcome(False, "this release has no gemma4_unified", applicable=False)
    for quantization in ("4bit", "8bit"):
        error, contrast = compare_quantized_tower(unified, quantization, "vision")
        if not error < BOUND or contrast < BOUND:
            return Outcome(True, f"{quantization}: image features are off by {error:.2g} of their size")
    return Outcome(False, f"image features in 4-bit and 8-bit are those of the dequantized weights, to {BOUND}")
