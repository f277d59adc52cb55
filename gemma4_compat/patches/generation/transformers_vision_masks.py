"""Image input works with caches whose sliding layers hold less than the others (26B-A4B, 31B).

Symptom: silent: different outputs for an image that comes after sliding layers have dropped tokens, as in the second
turn of a chat; with a static cache ``IndexError: index ... is out of bounds`` in ``create_masks_for_vision_model``.
This affects the 26B-A4B and the 31B, whose image tokens attend to each other.

Cause: If the layers of a cache do not all hold the same tokens, ``create_masks_for_vision_model`` gives the mask for
the sliding layers the size and the start of the first full attention layer.

Fix: Each of the two masks is created from what the layers of its kind hold. Logits equal those without a cache up to
rounding.

Remove when: transformers 5.13 to 5.16 are no longer supported.
"""

from typing import Any

from gemma4_compat._gemma4.attention import masks
from gemma4_compat.patches.api import MODELING_GEMMA4, Original, Outcome, Patch, Workspace

PATCH = Patch("F24", severity="wrong_result", affected=">=5.13.0,<5.17.0", applied_upstream="releases/tag/v5.17.0")


@PATCH.replaces(MODELING_GEMMA4, "create_masks_for_vision_model")
def create_masks(original: Original, *args: Any, **kwargs: Any) -> Any:
    return masks.masks(original, *args, **kwargs)


def reproduce(workspace: Workspace) -> Outcome:
    from transformers.models.gemma4 import modeling_gemma4

    from gemma4_compat._lab import scenarios, tiny

    if not hasattr(modeling_gemma4, "create_masks_for_vision_model"):
        return Outcome(False, "this release makes the masks for images another way", applicable=False)
    return scenarios.image_in_second_part(workspace.load_31b().float(), tiny.inputs(workspace.main, text_only=True))
