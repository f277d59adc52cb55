"""The tokens of an image attend to each other only in sliding layers of the 12B, as in training.

Symptom: silent: a forward of the 12B with an image, and so training and ``generate`` with its default cache, computes
other logits than the weights were trained for, and other than ``generate`` with a static cache.

Cause: ``gemma4_unified`` has the function that makes the masks of Gemma 4's images, causal in full attention, in a
copy of its own. Its ``create_masks_for_generate``, for compilable caches, calls it. ``Gemma4UnifiedModel.forward``
calls that of Gemma 3, whose images are seen both ways in every layer. For the 26B-A4B and the 31B this was `settled
<https://github.com/huggingface/transformers/issues/46711>`__ by google/gemma's own code and repaired in 5.13.0.

Fix: The text model gets the masks that the other path makes: causal in full attention; in sliding layers an image's
tokens attend to each other inside the window. Prompts without an image keep upstream's masks.

Remove when: ``Gemma4UnifiedModel.forward`` makes its masks with ``create_masks_for_vision_model``.
"""

import inspect
import sys
from typing import Any

from gemma4_compat._gemma4.attention import masks
from gemma4_compat._gemma4.cache import cache_names
from gemma4_compat.patches.api import MODELING_UNIFIED, Original, Outcome, Patch, Workspace

# That one captures what gets these masks.
PATCH = Patch("F68", severity="wrong_result", affected=">=5.10.1", after="transformers-graph-decoding")

#: The argument by which the forward tells the text model of images.
_IMAGES = "gemma4_compat_images"


@PATCH.replaces(MODELING_UNIFIED, "Gemma4UnifiedModel.forward")
def forward(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(original).bind(self, *args, **kwargs).arguments if args else kwargs
    kinds, mask = given.get("mm_token_type_ids"), given.get("attention_mask")
    if (
        kinds is None
        or isinstance(mask, dict)  # made by the caller
        or self.config.get_text_config().use_bidirectional_attention != "vision"
    ):
        return original(self, *args, **kwargs)
    return original(self, *args, **kwargs, **{_IMAGES: (kinds, mask)})


@PATCH.replaces(MODELING_UNIFIED, "Gemma4UnifiedTextModel.forward")
def text_forward(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    images = kwargs.pop(_IMAGES, None)
    if images is not None:
        kwargs["attention_mask"] = _masks(self.config, *images, **kwargs)
    return original(self, *args, **kwargs)


def _masks(config: Any, kinds: Any, mask: Any, *, inputs_embeds: Any, position_ids: Any, **kwargs: Any) -> Any:
    unified = sys.modules[MODELING_UNIFIED]
    names = ("attention_mask", "inputs_embeds", "position_ids")
    given = {name: value for name, value in kwargs.items() if name in cache_names.NAMES}
    given |= dict(zip(names, (mask, inputs_embeds, position_ids), strict=True))
    images = unified.get_block_sequence_ids_for_mask(kinds, device=inputs_embeds.device)
    make = getattr(unified, "create_masks_for_vision_model", None)
    if make is None:
        return masks.of_images(images, config=config, **given)
    return masks.masks(make, config=config, block_sequence_ids=images, **given)


def reproduce(workspace: Workspace) -> Outcome:
    import torch

    from gemma4_compat._lab import scenarios, tiny, tiny_models

    workspace.needs("unified")
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
