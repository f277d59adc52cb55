"""``RuntimeError: mixed dtype (CPU): expect parameter to have scalar type of Float`` in ``patch_ln1`` as soon as a
quantized ``gemma4_unified`` model (the 12B) gets an image.

Why: the 12B has no vision tower. ``Gemma4UnifiedVisionEmbedder`` takes patches of pixels to the model's width, and
casts them to ``patch_dense.weight.dtype`` first. Quantized, that is ``uint8`` or ``int8``; from 5.13 on such a dtype
is not cast to, and the pixels stay float32, as the processor makes them. Either way the norm before the linear is
bfloat16.

Here: upstream's function runs with a linear that tells the dtype of the unquantized parameters beside it, to which the
unquantized model casts. What the second linear of the embedder is told, see
``transformers_quantized_audio_unified.py``.

Goes when transformers casts the pixels to the dtype of ``patch_ln1``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gemma4_compat._engine.patch import Outcome, Patch, Severity, Target
from gemma4_compat._quantization import compute_dtype

if TYPE_CHECKING:
    from gemma4_compat._reproduction.workspace import Workspace

#: As in ``transformers_quantized_vision.py``. Two linears magnify less than a tower: 0.006 in 4-bit, 0.009 in 8-bit.
BOUND = 0.05


def vision_embedder(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    return original(compute_dtype.for_quantized(self, self.pos_embedding.dtype, "patch_dense"), *args, **kwargs)


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._reproduction.scenarios import compare_quantized_tower

    unified = workspace.unified()
    if unified is None:
        return Outcome(False, "this release has no gemma4_unified", applicable=False)
    for quantization in ("4bit", "8bit"):
        error, contrast = compare_quantized_tower(unified, quantization, "vision")
        if not error < BOUND or contrast < BOUND:
            return Outcome(True, f"{quantization}: image features are off by {error:.2g} of their size")
    return Outcome(False, f"image features in 4-bit and 8-bit are those of the dequantized weights, to {BOUND}")


_UNIFIED = "transformers.models.gemma4_unified.modeling_gemma4_unified"

PATCH = Patch(
    id="transformers-quantized-vision-unified",
    summary="a quantized gemma4_unified model, the 12B, sees the image",
    symptom="RuntimeError: mixed dtype (CPU): expect parameter to have scalar type of Float, in "
    "Gemma4UnifiedVisionEmbedder",
    severity=Severity.CRASH,
    failure_points=("F9", "F30"),
    distribution="transformers",
    affected=">=5.10.1",
    measured="5.23.0",
    bug=("https://github.com/huggingface/transformers/issues/46899",),
    requires=("bitsandbytes",),
    retire_when="Gemma4UnifiedVisionEmbedder casts the pixels of a quantized model to the dtype of its norms",
    targets=(
        Target(
            module=_UNIFIED,
            name="Gemma4UnifiedVisionEmbedder.forward",
            replacement=vision_embedder,
            known={
                "07a1a393a95b": "5.10.1 - 5.12.1",
                "07ef4351b2b0": "5.13.0 - 5.15.1",
                "61899d618261": "5.16.0 - 5.23.0",
            },
        ),
    ),
    reproduce=reproduce,
)
