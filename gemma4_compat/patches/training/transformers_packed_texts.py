"""Texts packed into one row do not see one another, also with a mask or a cache.

Symptom: silent: with several texts in one row and ``position_ids`` that restart at 0, a text attends to those before
it, so logits, loss and gradients are not those of the text. This happens with an ``attention_mask`` of ones, which
collators add, with a mask that hides padding, and in ``Gemma4ForCausalLM`` and ``Gemma4TextModel`` without
``use_cache=False``. From 5.23.0 on the tokens of an image in a second text also see the wrong tokens without either
(12B, 26B-A4B, 31B).

Cause: ``_preprocess_mask_arguments`` looks at positions only if there is neither a mask nor a cache; a text model
creates its cache before its masks. Since 5.23.0 packed masks are asked about positions within a text, but
``create_masks_for_vision_model`` numbers images by their place in the row.

Fix: A row in which the positions of all tokens count up by one and restart at 0 gets upstream's mask for packed texts,
with any mask of two dimensions and with a cache that holds nothing yet. Positions of padding are not looked at. Rows
with other positions, masks of four dimensions, caches that hold tokens and static caches are upstream's. Logits are
those of each text by itself up to rounding, in every attention implementation, and under ``torch.compile``. Other
models are left alone: upstream's documentation says that a mask turns its search off.

Remove when: transformers separates packed texts with a mask of two dimensions and with an empty cache.
"""

from typing import Any

from gemma4_compat._gemma4.attention import masks, packing
from gemma4_compat._gemma4.cache import cache_names
from gemma4_compat.patches.api import MODELING_GEMMA4, MODELING_UNIFIED, Original, Outcome, Patch, Workspace

PATCH = Patch("F115", severity="wrong_result", affected=">=5.5.0", bug="pull/46634")

_NAMES = ("config", "inputs_embeds", "attention_mask", cache_names.NEW, "position_ids")


@PATCH.replaces("transformers.masking_utils", "_preprocess_mask_arguments")
def preprocess(original: Original, *args: Any, **kwargs: Any) -> Any:
    found = original(*args, **kwargs)
    early, mask, texts, tokens, keys, *_ = found
    if early or texts is not None or tokens == 1 or tokens != keys:
        return found
    given = dict(zip(_NAMES, args)) | cache_names.renamed(kwargs, cache_names.NEW)
    config, embeds, cache, positions = (given.get(name) for name in _NAMES if name != "attention_mask")
    if mask is None and cache is None:  # upstream has looked
        return found
    texts = packing.numbers(config, embeds, mask, cache, positions)
    return found if texts is None else (early, mask, texts, *found[3:])


@PATCH.replaces(MODELING_GEMMA4, "create_masks_for_vision_model", group="gemma4", affected=">=5.23.0")
@PATCH.replaces(MODELING_UNIFIED, "create_masks_for_vision_model", group="gemma4_unified", affected=">=5.23.0")
def vision_masks(original: Original, *args: Any, **kwargs: Any) -> Any:  # called with keywords
    from transformers import masking_utils

    cache, mask, positions = cache_names.cache_in(kwargs), kwargs.get("attention_mask"), kwargs.get("position_ids")
    if positions is None or (mask is not None and (not hasattr(mask, "ndim") or mask.ndim != 2)):
        return original(*args, **kwargs)
    config, embeds, images = (kwargs[name] for name in ("config", "inputs_embeds", "block_sequence_ids"))
    if mask is None and cache is None:
        texts = masking_utils.find_packed_sequence_indices(positions.expand(embeds.shape[0], -1))
    else:
        texts = packing.numbers(config, embeds, mask, cache, positions)
    if texts is None:
        return original(*args, **kwargs)
    given = {name: value for name, value in kwargs.items() if name != "block_sequence_ids"}
    return masks.of_images(images, texts, **given)


def reproduce(workspace: Workspace) -> Outcome:
    import torch

    from gemma4_compat._lab import tiny

    model = workspace.load().float()
    ids = tiny.inputs(workspace.main, text_only=True)["input_ids"][:1]
    text = ids[:, : ids.shape[1] // 2].flip(1)
    both = torch.cat([ids, text], dim=1)
    positions = torch.cat([torch.arange(part.shape[1]) for part in (ids, text)])[None].to(both.device)
    with torch.no_grad():
        alone = model(input_ids=text).logits
        packed = model(input_ids=both, position_ids=positions, attention_mask=torch.ones_like(both)).logits
    off = ((packed[:, -text.shape[1] :] - alone).abs().max() / alone.abs().max()).item()
    return Outcome(off > 1e-3, f"the logits of a text packed after another are off by {off:.2g} of the largest")
