"""Image input works with a static cache (12B, 26B-A4B, 31B).

Symptom: silent: with a static cache, image tokens do not attend to each other on the 12B, the 26B-A4B and the 31B
(from 5.23.0 on only if the prompt is read in chunks). The logits are off by as much as between any two prompts.

Cause: In these models the tokens of one image attend to each other in both directions. For a compilable cache,
``GenerationMixin.prepare_inputs_for_generation`` creates the masks itself, at a point where it has not yet picked up
``mm_token_type_ids``, which mark the positions of the images. From 5.23.0 on it has, but of a chunk only its
part, which counts from the beginning of the text.

Fix: For the prompt, the model gets its two-dimensional mask, as it does with any other cache, and creates the masks
itself. Decoding, which is the part that is compiled, is unchanged. So are calls without ``mm_token_type_ids`` and
models whose image tokens do not attend to each other in both directions. Logits equal those of the default cache up
to rounding.

Remove when: static caches see images as the default cache does, also in chunks.
"""

from typing import Any

from gemma4_compat._gemma4.models.family import is_gemma4_config
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F24 F30",
    severity="wrong_result",
    affected=">=5.5.0",
    needs="transformers-image-masks-unified transformers-static-cache transformers-vision-masks",
)


@PATCH.replaces("transformers.generation.utils", "GenerationMixin.prepare_inputs_for_generation")
def prepare_inputs(original: Original, self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
    inputs = original(self, input_ids, *args, **kwargs)
    if (
        "is_first_iteration" in kwargs
        and kwargs["is_first_iteration"]
        and kwargs.get("mm_token_type_ids") is not None
        and isinstance(inputs.get("attention_mask"), dict)
        and is_gemma4_config(self.config)
        and getattr(self.config.get_text_config(), "use_bidirectional_attention", None) == "vision"
    ):
        inputs["attention_mask"] = kwargs.get("attention_mask")
    return inputs


def reproduce(workspace: Workspace) -> Outcome:
    import contextlib

    from gemma4_compat._gemma4.models import variants
    from gemma4_compat._lab import scenarios, tiny_models

    batch, off = workspace.inputs(), {}
    if workspace.variant is None:
        large = workspace.load_31b().float()
        off["the 31B"] = max(_off(large, batch), _off_in_chunks(large))
    elif workspace.variant != variants.UNIFIED:
        model = workspace.load().float()
        off[f"the {workspace.variant}"] = max(_off(model, batch), _off_in_chunks(model))
    if workspace.variant in (None, variants.UNIFIED):
        # A model with a full layer before its last, because the last layer's image tokens are never read.
        with contextlib.suppress(ImportError):  # before 5.10.1 there is no 12B
            text = {name: batch[name] for name in ("input_ids", "attention_mask", "mm_token_type_ids")}
            model = tiny_models.unified_model().to(workspace.main)
            masks = scenarios.image_masks(model, text["mm_token_type_ids"])
            off["the 12B"] = max(_off(model, text, masks), _off_in_chunks(model))
    said = ", ".join(f"{value:.2g} on {name}" for name, value in off.items())
    return Outcome(
        max(off.values()) > 1e-4, f"the first logits after an image, with a static cache, are off by {said}"
    )


def _off(model: Any, batch: dict[str, Any], masks: Any = None, **more: Any) -> float:
    """How far the first logits with a static cache are from those with the default cache, or with ``masks``."""
    import torch

    options = {"max_new_tokens": 2, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    found = model.generate(**batch, **options, **more, cache_implementation="static").logits[0]
    if masks is None:
        expected = model.generate(**batch, **options).logits[0]
    else:
        with torch.no_grad():
            expected = model(batch["input_ids"], attention_mask=masks).logits[:, -1]
    return float((expected - found).abs().max())


def _off_in_chunks(model: Any) -> float:
    """The same of an image in the third chunk of a prompt; 0 where prompts with images are not read in chunks."""
    import torch
    import transformers
    from packaging.version import Version

    from gemma4_compat._lab import scenarios, tiny

    both_ways = model.config.get_text_config().use_bidirectional_attention == "vision"
    if not both_ways or Version(transformers.__version__) < Version("5.23.0"):
        return 0.0
    ids = tiny.inputs(model.device, text_only=True)["input_ids"]
    kinds = torch.zeros_like(ids)
    kinds[:, 16:20] = 1
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds}
    return _off(model, batch, scenarios.image_masks(model, kinds), prefill_chunk_size=8)
