"""The tokens of an image attend to each other only in sliding layers of the 12B, as in training.

Symptom: silent: a forward of the 12B with an image, and so training and ``generate`` with its default cache, computes
other logits than the weights were trained for, and other than ``generate`` with a static cache.

Cause: ``gemma4_unified`` has the function that makes the masks of Gemma 4's images, causal in full attention, in a
copy of its own. Its ``create_masks_for_generate``, for compilable caches, calls it. ``Gemma4UnifiedModel.forward``
calls that of Gemma 3, whose images are seen both ways in every layer. For the 26B-A4B and the 31B this was `settled
<https://github.com/huggingface/transformers/issues/46711>`__ by google/gemma's own code and repaired in 5.13.0.

Fix: The forward makes the masks that the other path makes: causal in full attention; in sliding layers an image's
tokens attend to each other inside the window. Prompts without an image keep upstream's masks.

Remove when: ``Gemma4UnifiedModel.forward`` makes its masks with ``create_masks_for_vision_model``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gemma4_compat._attention import masks
from gemma4_compat._engine.patch import ActsOn, Kind, Outcome, Patch, Severity, Target

if TYPE_CHECKING:
    from gemma4_compat._reproduction.workspace import Workspace

_UNIFIED = "transformers.models.gemma4_unified.modeling_gemma4_unified"


def get_block_sequence_ids_for_mask(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # For a prompt without images the model makes its own int64 types. Reading their values would cost a sync.
    import torch

    return original(*args, **kwargs).to(torch.int32)


def create_masks_for_generate(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    import torch

    images = kwargs.get("block_sequence_ids")
    if images is None or images.dtype != torch.int32:
        return original(*args, **kwargs)
    make = getattr(sys.modules[_UNIFIED], "create_masks_for_vision_model", None)
    if make is not None:
        return masks.masks(make, *args, **kwargs)
    return masks.of_images(images, **{name: value for name, value in kwargs.items() if name != "block_sequence_ids"})


def reproduce(workspace: Workspace) -> Outcome:
    import torch

    from gemma4_compat._models import variants
    from gemma4_compat._reproduction import scenarios, tiny, tiny_models

    if workspace.variant not in (None, variants.UNIFIED):
        return Outcome(False, f"the {workspace.variant} has other masks", applicable=False)
    try:
        model = tiny_models.unified_model().to(workspace.main)
    except ImportError:
        return Outcome(False, "this release has no gemma4_unified", applicable=False)
    ids = tiny.inputs(workspace.main, text_only=True)["input_ids"]
    kinds, window = torch.zeros_like(ids), model.config.get_text_config().sliding_window
    kinds[:, 8 : 8 + window + 4] = 1
    with torch.no_grad():
        expected = model(ids, attention_mask=scenarios.image_masks(model, kinds)).logits
        off = (expected - model(ids, mm_token_type_ids=kinds).logits).abs().max().item()
    return Outcome(off > 1e-3, f"the logits of a text with an image are off by {off:.2g}")


PATCH = Patch(
    id="transformers-image-masks-unified",
    kind=Kind.REPAIR,
    severity=Severity.WRONG_RESULT,
    failure_points=("F68",),
    distribution="transformers",
    affected=">=5.10.1",
    acts_on=ActsOn.GEMMA4,
    targets=(
        Target(module=_UNIFIED, name="get_block_sequence_ids_for_mask", replacement=get_block_sequence_ids_for_mask),
        Target(module=_UNIFIED, name="create_masks_for_generate", replacement=create_masks_for_generate),
    ),
    reproduce=reproduce,
)
