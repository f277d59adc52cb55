"""The tokens of an image attend to each other only in sliding layers, as in training (26B-A4B, 31B).

Symptom: silent: images give different outputs on the 26B-A4B and the 31B than on transformers 5.13 and newer. From
5.9.0 on this affects every image; before, images with more tokens than the sliding window; and before 5.6.0, also
images without ``pixel_values`` in a later part of a text.

Cause: From 5.9.0 to 5.12.1 the masks of all layers let an image's tokens attend to later ones of the same image, but
layers of full attention were trained with a causal mask. Until 5.12.1 the mask of the sliding layers lets them attend
to the whole image, even outside the window. Before 5.6.0 the model makes no mask for an image if its cache already
holds tokens, unless it is given ``pixel_values``.

Fix: The masks are those of 5.13 and newer: causal in full attention; in sliding layers an image's tokens attend to
each other inside the window, wherever the image is. Prompts without an image keep upstream's masks. The 12B has a
patch of its own. Logits equal those of 5.23.0 up to rounding.

Remove when: transformers before 5.13 is no longer supported.
"""

from typing import Any

from gemma4_compat._gemma4.attention import masks
from gemma4_compat.patches.api import MODELING_GEMMA4, Original, Outcome, Patch, Workspace

PATCH = Patch("F68", severity="wrong_result", affected=">=5.5.0,<5.13.0", applied_upstream="releases/tag/v5.13.0")


@PATCH.replaces(MODELING_GEMMA4, "create_causal_mask_mapping", optional=True)  # until 5.8.1
def create_causal_mask_mapping(  # before 5.9.0
    original: Original,
    config: Any,
    inputs_embeds: Any,
    attention_mask: Any,
    past_key_values: Any,
    position_ids: Any,
    mm_token_type_ids: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if mm_token_type_ids is None:
        return original(
            config, inputs_embeds, attention_mask, past_key_values, position_ids, mm_token_type_ids, *args, **kwargs
        )
    return masks.of_images(
        masks.image_numbers(mm_token_type_ids),
        config=config.get_text_config(),
        inputs_embeds=inputs_embeds,
        attention_mask=attention_mask,
        past_key_values=past_key_values,
        position_ids=position_ids,
    )


@PATCH.replaces(MODELING_GEMMA4, "get_block_sequence_ids_for_mask", optional=True)  # from 5.9.0 on
def get_block_sequence_ids_for_mask(original: Original, *args: Any, **kwargs: Any) -> Any:
    # For a prompt without images the model makes its own int64 types. Reading their values would cost a sync.
    import torch

    return original(*args, **kwargs).to(torch.int32)


@PATCH.replaces("transformers.masking_utils", "create_masks_for_generate")
def create_masks_for_generate(original: Original, *args: Any, **kwargs: Any) -> Any:
    import torch

    images = kwargs.get("block_sequence_ids")
    if images is None or images.dtype != torch.int32 or kwargs["config"].model_type != "gemma4_text":
        return original(*args, **kwargs)
    names = ("config", "inputs_embeds", "attention_mask", "past_key_values", "position_ids")
    return masks.of_images(images, **{name: kwargs[name] for name in names})


def reproduce(workspace: Workspace) -> Outcome:
    import torch
    from transformers import DynamicCache

    from gemma4_compat._lab import scenarios, tiny

    model = (workspace.load_31b() if workspace.variant is None else workspace.load()).float()
    text = model.config.get_text_config()
    if text.model_type != "gemma4_text" or text.use_bidirectional_attention != "vision":
        return Outcome(False, "images have no mask of their own in this model", applicable=False)
    ids = tiny.inputs(workspace.main, text_only=True)["input_ids"]
    kinds, start, window = torch.zeros_like(ids), 6, text.sliding_window
    kinds[:, 8 : 8 + window + 4] = 1
    with torch.no_grad():
        expected = model(ids, attention_mask=scenarios.image_masks(model, kinds)).logits
        whole = model(ids, mm_token_type_ids=kinds).logits
        cache = DynamicCache()
        model(ids[:, :start], past_key_values=cache)
        later = model(ids[:, start:], mm_token_type_ids=kinds, past_key_values=cache).logits
    off = (expected - whole).abs().max().item(), (expected[:, start:] - later).abs().max().item()
    return Outcome(
        max(off) > 1e-3,
        f"the logits of a text with an image are off by {off[0]:.2g}, read in two parts by {off[1]:.2g}",
    )
