"""silent: other answers to an image that comes where sliding layers have forgotten something, as in the second turn of
a chat; with a static cache ``IndexError: index ... is out of bounds`` in ``create_masks_for_vision_model``. On the
26B-A4B and the 31B, whose image tokens see each other.

Why: of a cache whose layers do not all hold the same tokens, the mask for the sliding layers gets the size and the
beginning of the first layer of full attention.

Here: each of the two masks is made from what the layers of its kind hold.

Goes when transformers 5.13 to 5.16 are no longer supported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gemma4_compat._engine.patch import Outcome, Patch, Severity, Target
from gemma4_compat._models import masks

if TYPE_CHECKING:
    from gemma4_compat._reproduction.workspace import Workspace


def create_masks(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return masks.masks(original, *args, **kwargs)


def reproduce(workspace: Workspace) -> Outcome:
    from transformers.models.gemma4 import modeling_gemma4

    from gemma4_compat._reproduction import scenarios, tiny, tiny_models

    if not hasattr(modeling_gemma4, "create_masks_for_vision_model"):
        return Outcome(False, "this release makes the masks for images another way", applicable=False)
    model = tiny.load(
        workspace.cached(tiny_models.build_checkpoint, text_variant="31B"), device=workspace.main
    ).float()
    return scenarios.image_in_second_part(model, tiny.inputs(workspace.main, text_only=True))


PATCH = Patch(
    id="transformers-vision-masks",
    summary="images with caches whose sliding layers hold less than the others (26B-A4B, 31B)",
    symptom="silent: other answers to an image in a later turn; with a static cache IndexError: index is out of "
    "bounds in create_masks_for_vision_model",
    severity=Severity.WRONG_RESULT,
    failure_points=("F24",),
    distribution="transformers",
    affected=">=5.13.0,<5.17.0",
    measured="5.16.1",
    fixed="5.17.0",
    applied_upstream="https://github.com/huggingface/transformers/releases/tag/v5.17.0",
    retire_when="transformers 5.13 to 5.16 are no longer supported",
    targets=(
        Target(
            module="transformers.models.gemma4.modeling_gemma4",
            name="create_masks_for_vision_model",
            replacement=create_masks,
            known={
                "8dfa74433ad7": "5.13.0 - 5.16.1",
            },
        ),
    ),
    reproduce=reproduce,
)
