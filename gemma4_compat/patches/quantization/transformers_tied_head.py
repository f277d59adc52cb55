"""A tied head is not quantized, whatever ``llm_int8_skip_modules`` names.

Symptom: ``AssertionError`` in ``fix_4bit_weight_quant_state_from_module`` in the first forward, or ``AttributeError:
'Parameter' object has no attribute 'CB'`` in 8 bits (``'SCB'`` in ``state_dict``), when the list of
``llm_int8_skip_modules`` does not name ``lm_head``: ``["model.vision_tower"]``, for example, or an empty one.

Cause: ``HfQuantizer.get_modules_to_not_convert`` looks for tied weights only if there is no list. With a list, the
head becomes a quantized layer, and the checkpoint holds no weight for it. ``tie_weights`` then gives it the
embedding's weight, which is not quantized.

Fix: A head of a Gemma 4 model that takes its weight from the embedding is not quantized. The patch adds it to
``llm_int8_skip_modules`` of the model's configuration, so a saved model also names it and loads anywhere. The
configuration passed by the caller is not changed. A head with its own weight, by the configuration or in the
checkpoint, is quantized as before.

Remove when: transformers leaves tied weights unquantized with any list.
"""

import copy
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gemma4_compat._gemma4.checkpoint.header import header
from gemma4_compat._gemma4.models import family
from gemma4_compat._gemma4.quantization import config
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F36", severity="crash", affected=">=5.5", requires="accelerate bitsandbytes")


@PATCH.replaces(
    "transformers.quantizers.quantizer_bnb_4bit", "Bnb4BitHfQuantizer._process_model_before_weight_loading"
)
@PATCH.replaces(
    "transformers.quantizers.quantizer_bnb_8bit", "Bnb8BitHfQuantizer._process_model_before_weight_loading"
)
def process_model_before_weight_loading(original: Original, self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    skip = self.quantization_config.llm_int8_skip_modules
    if skip is not None and family.has_parts(model):
        heads = sorted(filter(config.converts(skip), config.tied_linears(model)))
        if heads:
            keys = _keys(kwargs.get("checkpoint_files") or ())
            heads = [head for head in heads if not _is_stored(head, keys, quantized=self.pre_quantized)]
        if heads:
            self.quantization_config = copy.copy(self.quantization_config)
            self.quantization_config.llm_int8_skip_modules = [*skip, *heads]
    return original(self, model, *args, **kwargs)


def _is_stored(head: str, keys: set[str], *, quantized: bool) -> bool:
    """Whether a checkpoint has a weight for the head that can be loaded into a quantized layer.

    transformers unties such a head, because a quantized weight differs from the embedding's. In a ``quantized``
    checkpoint the weight needs its scales.
    """
    if quantized:
        return f"{head}.SCB" in keys or any(key.startswith(f"{head}.weight.") for key in keys)
    return f"{head}.weight" in keys


def _keys(files: Iterable[str]) -> set[str]:
    """The names of a checkpoint's tensors."""
    import torch

    found: set[str] = set()
    for file in files:
        if str(file).endswith(".safetensors"):
            found |= header(Path(file)).keys()
        else:
            mapped = zipfile.is_zipfile(file)  # torch's older format cannot be
            found |= torch.load(file, map_location="meta", weights_only=True, mmap=mapped).keys()
    return found


def reproduce(workspace: Workspace) -> Outcome:
    import transformers

    from gemma4_compat._lab import tiny_models

    found = []
    for quantization in ("4bit", "8bit"):
        reference = workspace.load(quantization)
        settings = copy.copy(reference.config.quantization_config)
        settings.llm_int8_skip_modules = [name for name in settings.llm_int8_skip_modules if name != "lm_head"]
        model = getattr(transformers, tiny_models.class_name(workspace.checkpoint)).from_pretrained(
            workspace.checkpoint,
            dtype=reference.dtype,
            device_map={"": workspace.main},
            quantization_config=settings,
        )
        found.append(workspace.difference(workspace.reference(quantization), model.eval()))
    return Outcome.of_parity(max(found), "4-bit and 8-bit models that skip lm_head by name")
