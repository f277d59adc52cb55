"""Audio input works in a quantized gemma4_unified model (the 12B).

Symptom: silent: a quantized ``gemma4_unified`` model (the 12B) hears noise, if anything, instead of audio. Its audio
features have nothing to do with those of the same weights, dequantized.

Cause: The 12B has no towers. ``Gemma4UnifiedMultimodalEmbedder`` projects pieces of audio, and the output of the
image embedder, to the width of the model. It casts them to ``embedding_projection.weight.dtype`` first. In a
quantized model that is ``uint8`` or ``int8``, and little is left of samples between -1 and 1.

Fix: Upstream's function runs with a linear that reports the dtype of the input, so that nothing is cast, as in later
releases.

Remove when: transformers below 5.13.0 is no longer supported: later releases do not cast to an integer dtype.
"""

from typing import Any

from gemma4_compat._gemma4.models import compute_dtype
from gemma4_compat.patches.api import MODELING_UNIFIED, Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F10 F30",
    severity="wrong_result",
    affected=">=5.10.1,<5.13.0",
    bug="issues/46899",
    applied_upstream="pull/46904",
    requires="bitsandbytes",
)

#: As in ``transformers_quantized_vision_unified.py``: 0.004 in 4-bit, 0.007 in 8-bit; 80 and 0.7 without the patch.
BOUND = 0.05


@PATCH.replaces(MODELING_UNIFIED, "Gemma4UnifiedMultimodalEmbedder.forward")
def multimodal_embedder(original: Original, self: Any, inputs_embeds: Any) -> Any:
    return original(compute_dtype.for_quantized(self, inputs_embeds.dtype, "embedding_projection"), inputs_embeds)


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._lab.scenarios import compare_quantized_tower

    unified = workspace.unified()
    if unified is None:
        return Outcome(False, "this release has no gemma4_unified", applicable=False)
    for quantization in ("4bit", "8bit"):
        error, contrast = compare_quantized_tower(unified, quantization, "audio")
        if not error < BOUND or contrast < BOUND:
            return Outcome(True, f"{quantization}: sound features are off by {error:.2g} of their size")
    return Outcome(False, f"sound features in 4-bit and 8-bit are those of the dequantized weights, to {BOUND}")
