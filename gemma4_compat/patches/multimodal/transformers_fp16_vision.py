"""Image input works in a float16 model with standardized image features (26B-A4B, 31B).

Symptom: silent: in float16 the features of an image, and with them all logits of the prompt, are NaN in the 26B-A4B
and the 31B.

Cause: ``Gemma4VisionPooler`` multiplies by the square root of the hidden size in the dtype of the model. If the
features are standardized afterwards (``vision_config.standardize``), they are in the thousands before, and the product
exceeds 65504, the largest float16. The standardized features are small again.

Fix: A pooler that gets float16 works in float32. The features are standardized in float32 and become float16 again
when they leave the tower. Other dtypes are not affected.

Remove when: transformers below 5.10.1 is no longer supported.
"""

from pathlib import Path
from typing import Any

from gemma4_compat.patches.api import MODELING_GEMMA4, Original, Outcome, Patch, Workspace

PATCH = Patch("F25", severity="wrong_result", affected=">=5.5.0,<5.10.1", applied_upstream="pull/46277")

#: Bound for the image features' relative difference from float32: 0.006 on transformers 5.23, 0.008 on 5.5.0.
BOUND = 0.03


@PATCH.replaces(MODELING_GEMMA4, "Gemma4VisionPooler.forward")
def pool(original: Original, self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
    import torch

    if hidden_states.dtype is torch.float16:
        hidden_states = hidden_states.float()
    return original(self, hidden_states, *args, **kwargs)


@PATCH.replaces(MODELING_GEMMA4, "Gemma4VisionModel.forward")
def tower(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    import torch

    found = original(self, *args, **kwargs)
    # Not quantized with the linears, so it shows the dtype in which the tower works.
    if self.patch_embedder.position_embedding_table.dtype is torch.float16:
        if isinstance(found, tuple):
            return found[0].half(), *found[1:]
        found.last_hidden_state = found.last_hidden_state.half()
    return found


def _build_standardized(folder: Path) -> None:
    """A checkpoint whose image features, like the 26B's, are in the thousands until they are standardized."""
    import torch
    from transformers import Gemma4ForConditionalGeneration

    from gemma4_compat._lab import tiny, tiny_configs

    torch.manual_seed(3)
    config = tiny_configs.config()
    config.vision_config.standardize = True
    config.vision_config.use_clipped_linears = False
    model = Gemma4ForConditionalGeneration(config)
    batch = tiny.inputs()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.1)
        vision = model.model.vision_tower
        vision.std_bias.zero_()
        vision.std_scale.fill_(1.0)
        norm = vision.encoder.layers[-1].post_feedforward_layernorm.weight.fill_(1000.0)
        for _ in range(2):  # beyond float16 at the end of the pooler, within it before, and the bias is
            raw = vision(batch["pixel_values"], batch["image_position_ids"], return_dict=True).last_hidden_state
            norm.mul_(90_000 / raw.abs().max())
        vision.std_bias.copy_(raw.mean(0).clamp(-50_000, 50_000))
        vision.std_scale.fill_(1 / raw.std().item())
    model.to(torch.float16).save_pretrained(folder)


def reproduce(workspace: Workspace) -> Outcome:
    import torch

    from gemma4_compat._lab import tiny
    from gemma4_compat._lab.scenarios import features, relative

    batch = tiny.inputs(workspace.main)
    checkpoint = workspace.cached(_build_standardized)
    model = tiny.load(checkpoint, device=workspace.main, dtype=torch.float16)
    with torch.no_grad():
        if not model(**batch).logits.isfinite().all():
            return Outcome(True, "the logits of a prompt with an image are NaN")
    reference = tiny.load(checkpoint, device=workspace.main, dtype=torch.float32)
    found = relative(features(model, batch, "vision"), features(reference, batch, "vision"))
    return Outcome(not found < BOUND, f"image features in float16 are those of float32, to {found:.2g}")
