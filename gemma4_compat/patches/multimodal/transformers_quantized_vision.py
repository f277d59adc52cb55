"""Image input works with a quantized vision tower.

Symptom: silent: with a quantized vision tower the model describes grey, distorted shapes, the same ones for any
image. Two different images give the same features.

Cause: ``Gemma4VisionPatchEmbedder.forward`` casts the pixels to ``input_proj.weight.dtype``. In a quantized tower
that is ``uint8`` or ``int8``, and little is left of values between -1 and 1.

Fix: Upstream's function runs with linears that report the dtype of the unquantized parameters beside them, to which
the unquantized model casts. So the tower need not be excluded from quantization.

Remove when: transformers below 5.13.0 is no longer supported: later releases do not cast to an integer dtype.
"""

from typing import Any

from gemma4_compat._gemma4.models import compute_dtype
from gemma4_compat.patches.api import MODELING_GEMMA4, Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F9",
    severity="wrong_result",
    affected=">=5.5.0,<5.13.0",
    bug="issues/46932",
    applied_upstream="pull/46933",
    requires="bitsandbytes",
)

#: How far the features of the tiny random tower may be from those of the same weights, dequantized. The tower
#: magnifies the rounding of the kernels: 0.07 in 4-bit and 0.06 in 8-bit on transformers 5.23, 1.2 to 1.3 without the
#: patch.
BOUND = 0.15


@PATCH.replaces(MODELING_GEMMA4, "Gemma4VisionPatchEmbedder.forward")
def patch_embedder(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    return original(
        compute_dtype.for_quantized(self, self.position_embedding_table.dtype, "input_proj"), *args, **kwargs
    )


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._lab.scenarios import compare_quantized_tower

    workspace.needs("vision_tower")
    for quantization in ("4bit", "8bit"):
        error, contrast = compare_quantized_tower(workspace, quantization, "vision")
        if contrast < BOUND:
            return Outcome(
                True, f"{quantization}: an image and its negative have the same features (to {contrast:.2g})"
            )
        if not error < BOUND:
            return Outcome(True, f"{quantization}: image features are off by {error:.2g} of their size")
    return Outcome(False, f"image features in 4-bit and 8-bit are those of the dequantized weights, to {BOUND}")
