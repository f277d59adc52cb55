"""A model loaded from a 4-bit or 8-bit checkpoint can be saved again.

Symptom: ``NotImplementedError`` without a message from ``save_pretrained`` of a model loaded from a checkpoint that
bitsandbytes quantized. A model quantized while loading can be saved.

Cause: ``revert_weight_conversion`` reverses every operation that loading needed, to write the names of the original
checkpoint. The operations that build a quantized weight from its stored parts (``Bnb4bitDeserialize``,
``Bnb8bitDeserialize``) cannot be reversed. They need not be: the ``state_dict`` of bitsandbytes' layers contains those
parts.

Fix: These operations are not reversed. All others, such as renamed weights, are reversed as before.
``save_original_format=False``, which reverses nothing, is not needed.

Remove when: transformers reverses bitsandbytes' deserialization.
"""

from typing import Any

from gemma4_compat._engine.runtime import in_place
from gemma4_compat._gemma4.models import family
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F69", severity="crash", affected=">=5.5", requires="accelerate bitsandbytes")

_BUILDS_WEIGHTS = ("Bnb4bitDeserialize", "Bnb8bitDeserialize")


@PATCH.replaces("transformers.core_model_loading", "revert_weight_conversion")
def revert_weight_conversion(original: Original, model: Any, *args: Any, **kwargs: Any) -> Any:
    conversions = vars(model).get("_weight_conversions") or []
    kept = [conversion for conversion in conversions if not _builds_weights(conversion)]
    if len(kept) == len(conversions) or not family.has_parts(model):
        return original(model, *args, **kwargs)
    with in_place.assigned(model, "_weight_conversions", kept):
        return original(model, *args, **kwargs)


def _builds_weights(conversion: Any) -> bool:
    return any(type(operation).__name__ in _BUILDS_WEIGHTS for operation in getattr(conversion, "operations", ()))


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._lab import tiny

    found = []
    for quantization in ("4bit", "8bit"):
        model = workspace.load(quantization)
        for _ in range(2):  # the second time from a quantized checkpoint
            folder = workspace.new_folder()
            model.save_pretrained(folder)
            model = tiny.load(folder, device=workspace.main)
        found.append(workspace.difference(workspace.reference(quantization), model))
    return Outcome.of_parity(max(found), "4-bit and 8-bit models saved, loaded, saved and loaded")
