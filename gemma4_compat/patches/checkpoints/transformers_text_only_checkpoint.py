"""The text-only classes load the language model of a multimodal checkpoint.

Symptom: silent: ``Gemma4ForCausalLM.from_pretrained`` of a multimodal checkpoint has random weights and generates
gibberish. The load report lists every weight of the language model as MISSING and every weight of the file as
UNEXPECTED. The same happens with ``Gemma4TextModel`` and the unified (12B) classes, and before 5.6 with
``Gemma4Model``.

Cause: The checkpoint calls the language model ``model.language_model``, and the text-only classes call it ``model``.
transformers' conversion mapping has no entry for Gemma 4. Models that have one, such as Qwen 3.5, load.

Fix: ``PreTrainedModel._load_pretrained_model`` gets such a rename, added to the conversions of that load. So it works
with shards, device maps, disk offload and quantization like any other conversion. Weights of the file that are not
part of the language model are left out of the load report. The rename is not kept for saving: ``save_pretrained``
writes the names of the class that is saved.

A checkpoint that was *saved* quantized says so in a part of its config that the text-only class does not read. That is
refused with a ``Gemma4CompatError``. Checkpoints that are not in safetensors format, and the loading of adapters, are
left to upstream.

Remove when: transformers has conversions for ``gemma4_text`` and ``gemma4_unified_text``.
"""

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.models import family
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F23", severity="wrong_result", affected=">=5.5")

#: The one weight that has the same name in every language model, so it shows the prefix.
_ANCHOR = "embed_tokens.weight"
#: The same in a QAT checkpoint (``quant_method: "gemma"``).
_PACKED_ANCHOR = "embed_tokens.embedding_quantized"
_INSIDE = "language_model"
#: Tensors saved beside a quantized weight: bitsandbytes, QAT, compressed-tensors, GPTQ, AWQ.
_QUANTIZED = (".SCB", ".absmax", ".quant_map", ".weight_scale", ".embedding_scale", ".weight_packed", ".qweight")


@PATCH.replaces("transformers.modeling_utils", "PreTrainedModel._load_pretrained_model")
def load_pretrained_model(
    original: Original,
    model: Any,
    state_dict: Any,
    checkpoint_files: Any,
    load_config: Any,
    expected_keys: Any = None,
) -> Any:
    arguments = (model, state_dict, checkpoint_files, load_config, expected_keys)
    # expected_keys are given when an adapter is loaded
    if expected_keys is not None or not family.is_gemma4(model):
        return original(*arguments)
    keys = _keys(state_dict, checkpoint_files, load_config.sharded_metadata)
    rename = _rename(keys, [name for name, _ in model.named_parameters()], model.base_model_prefix)
    if rename is None:
        return original(*arguments)
    _refuse_quantized(keys, model, load_config)
    from transformers.core_model_loading import WeightRenaming

    before, after = rename
    # the whole name, because every occurrence of a match is replaced and "language_model." contains "model."
    conversion = WeightRenaming(source_patterns=rf"^{re.escape(before)}(.+)", target_patterns=rf"{after}\1")
    load_config = dataclasses.replace(load_config, weight_mapping=[conversion, *(load_config.weight_mapping or [])])
    info, index = original(model, state_dict, checkpoint_files, load_config)
    model._weight_conversions = [item for item in model._weight_conversions or [] if item is not conversion]
    if _INSIDE in before:
        beyond = [key for key in keys if not key.startswith((before, "lm_head."))]
        info.unexpected_keys = set(info.unexpected_keys).difference(beyond)
    return info, index


def _keys(state_dict: Any, checkpoint_files: Any, sharded: Any) -> list[str]:
    """The names of the tensors to load, without reading them."""
    if state_dict is not None:
        return list(state_dict)
    if sharded is not None:
        return list(sharded["weight_map"])
    if not checkpoint_files or not str(checkpoint_files[0]).endswith(".safetensors"):
        return []  # pickled: no Gemma 4 was released that way, and its names cannot be read without its weights
    from safetensors import safe_open

    with safe_open(checkpoint_files[0], framework="pt") as file:
        return list(file.keys())


def _rename(there: Iterable[str], here: Iterable[str], base_model_prefix: str) -> tuple[str, str] | None:
    """The prefixes of names in the checkpoint and here; None if transformers needs no help."""
    prefixes = [_prefix(there), _prefix(here)]
    saved, wanted = (prefix.split(".")[:-1] if prefix is not None else None for prefix in prefixes)
    if saved is None or wanted is None or _INSIDE not in saved:
        return None
    base = [base_model_prefix] if base_model_prefix else []
    if saved in (wanted, base + wanted) or base + saved == wanted:
        return None
    while saved and wanted and saved[-1] == wanted[-1]:
        saved, wanted = saved[:-1], wanted[:-1]
    return "".join(f"{part}." for part in saved), "".join(f"{part}." for part in wanted)


def _prefix(keys: Iterable[str]) -> str | None:
    """The prefix of the input embedding's name."""
    found = [
        key[: -len(anchor)]
        for key in keys
        for anchor in (_ANCHOR, _PACKED_ANCHOR)
        if key == anchor or key.endswith(f".{anchor}")
    ]
    return found[0] if len(found) == 1 else None


def _refuse_quantized(keys: Iterable[str], model: Any, load_config: Any) -> None:
    quantizer = load_config.hf_quantizer
    if any(key.endswith(_QUANTIZED) for key in keys) and not getattr(quantizer, "pre_quantized", False):
        name = type(model).__name__
        raise Gemma4CompatError(
            f"the checkpoint {str(load_config.pretrained_model_name_or_path)!r} was saved quantized, and says so in "
            f"the multimodal part of its config, which {name} does not read: its weights would be taken for something "
            f"else. Load it with Gemma4ForConditionalGeneration, or give {name}.from_pretrained a config= with the "
            "checkpoint's quantization_config set on its text_config."
        )


def reproduce(workspace: Workspace) -> Outcome:
    import torch
    import transformers

    from gemma4_compat._lab import tiny_models

    reference = workspace.outputs(workspace.load(), text_only=True)
    # One seed for both: random weights must not depend on what ran before.
    torch.manual_seed(0)
    name = tiny_models.class_name(workspace.checkpoint, text_only=True)
    model = (
        getattr(transformers, name)
        .from_pretrained(workspace.checkpoint, dtype=torch.bfloat16, device_map={"": workspace.main})
        .eval()
    )
    found = workspace.difference(reference, model, text_only=True)
    return Outcome.of_parity(found, f"{name} of a multimodal checkpoint")
