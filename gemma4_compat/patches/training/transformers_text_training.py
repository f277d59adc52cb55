"""A 26B-A4B or 31B can be trained on text only.

Symptom: ``ValueError: `mm_token_type_ids` is required as a model input when training`` from a forward in training mode
of a multimodal Gemma 4 whose image tokens attend to each other in both directions, for a batch without images.

Cause: Until 5.5.4, in training, ``create_causal_mask_mapping`` requires the types of tokens even if there is no image.
A tokenizer does not return ``mm_token_type_ids``; only the processor does.

Fix: Without ``pixel_values``, a missing ``mm_token_type_ids`` means that no token belongs to an image, as upstream
does it from 5.6.0 on. Masks, and so logits and gradients, are the same as with zeros. Types of images are another
patch's.

Remove when: transformers below 5.6.0 is no longer supported.
"""

from typing import Any

from gemma4_compat.patches.api import MODELING_GEMMA4, Original, Outcome, Patch, Workspace

PATCH = Patch("F58", severity="crash", affected=">=5.5,<5.6", bug="issues/45200", applied_upstream="pull/45454")


@PATCH.replaces(MODELING_GEMMA4, "create_causal_mask_mapping")
def create_causal_mask_mapping(
    original: Original,
    config: Any,
    inputs_embeds: Any,
    attention_mask: Any,
    past_key_values: Any,
    position_ids: Any,
    mm_token_type_ids: Any = None,
    pixel_values: Any = None,
    is_training: bool = False,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if mm_token_type_ids is None and pixel_values is None:
        is_training = False  # upstream reads it only for that error
    given = (config, inputs_embeds, attention_mask, past_key_values, position_ids, mm_token_type_ids, pixel_values)
    return original(*given, is_training, *args, **kwargs)


def reproduce(workspace: Workspace) -> Outcome:
    import torch

    from gemma4_compat._lab import tiny, tiny_models

    workspace.needs("gemma4")
    checkpoint = (
        workspace.cached(tiny_models.build_checkpoint, variant="31B")
        if workspace.variant is None
        else workspace.checkpoint
    )
    model = tiny.load(checkpoint, device=workspace.main).train()
    batch = workspace.inputs(text_only=True)
    zeros = torch.zeros_like(batch["input_ids"])
    right = model(**batch, mm_token_type_ids=zeros, labels=batch["input_ids"])
    found = model(**batch, labels=batch["input_ids"])
    off = (right.logits - found.logits).abs().max().item()
    return Outcome(
        off > 0 or right.loss.item() != found.loss.item(),
        f"{tiny_models.class_name(checkpoint)} on text: logits differ by {off:.3g} from those with zeros given",
        off,
    )
