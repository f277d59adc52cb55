"""Every patch: ``measured.json`` lists them, and :data:`STACKED` orders those that replace the same functions."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
from collections.abc import Collection, Sequence
from functools import partial
from importlib import resources
from typing import Any

from gemma4_compat._engine import versions
from gemma4_compat._engine.patch import LatePatch, Patch, Target

_MEASURED = json.loads(resources.files(__package__).joinpath("measured.json").read_text(encoding="utf-8"))
#: The measured releases of each library, oldest first.
RELEASES: dict[str, list[str]] = _MEASURED["releases"]
#: ``area.file`` of each patch -> the modules of its targets: its file is imported when one of them is.
MODULES: dict[str, list[str]] = _MEASURED["modules"]
#: Target -> fingerprint -> the releases that have that code.
KNOWN: dict[str, dict[str, str]] = _MEASURED["known"]
#: Patch -> errors of its reproduction without the shim.
RAISED: dict[str, list[str]] = _MEASURED["raised"]

#: The patches that replace a function which others also replace, or are ``after`` others; a later one is on top.
STACKED: tuple[str, ...] = (
    "multimodal.transformers_quantized_audio",
    "multimodal.transformers_quantized_vision_unified",
    "multimodal.transformers_fp16_vision_unified",
    "multimodal.transformers_audio_dtype",
    "multimodal.transformers_audio_autocast",
    "multimodal.transformers_audio_attention",
    "multimodal.transformers_audio_mask",
    "training.transformers_uncached_sharing",
    "training.transformers_rotary_order",
    "training.transformers_rotary_cast",
    "training.transformers_cudnn_padding",
    "training.transformers_sliding_windows",
    "training.transformers_flash_attention",
    "training.transformers_packed_texts",
    "training.transformers_attention_weights",
    "training.transformers_reentrant_checkpointing",
    "training.transformers_checkpointed_states",
    "training.transformers_chunked_loss",
    "training.transformers_chunked_mlp",
    "training.transformers_accumulation_weights",
    "placement.accelerate_skip_keys",
    "placement.accelerate_nested_map",
    "placement.transformers_shared_kv",
    "placement.transformers_placement_names",
    "placement.transformers_auto_map",
    "placement.transformers_per_layer_devices",
    "offload.accelerate_hf_initialized",
    "offload.accelerate_int8_offload",
    "offload.accelerate_tied_on_disk",
    "offload.accelerate_offload_folder",
    "offload.accelerate_disk_buffers",
    "offload.accelerate_load_tied",
    "offload.bitsandbytes_meta_quant_state",
    "offload.transformers_model_device",
    "adapters.accelerate_dispatch_adapters",
    "adapters.peft_adapter_load",
    "adapters.peft_adapter_keys",
    "adapters.peft_failed_load",
    "adapters.peft_keep_dispatch",
    "adapters.peft_clippable_linear",
    "adapters.transformers_adapter_keys",
    "adapters.peft_quantized_merge",
    "adapters.peft_merge_offloaded",
    "adapters.peft_tied_merge",
    "adapters.peft_qat_merge",
    "adapters.peft_resized_vocabulary",
    "adapters.peft_quantized_experts",
    "adapters.peft_quantized_tuners",
    "adapters.peft_changed_base",
    "adapters.peft_adalora_ranks",
    "adapters.transformers_failed_adapter",
    "adapters.peft_cache_name",
    "adapters.peft_input_devices",
    "adapters.peft_virtual_tokens",
    "adapters.transformers_adapter_names",
    "adapters.transformers_adapter_placement",
    "checkpoints.peft_save_offloaded",
    "checkpoints.transformers_text_only_checkpoint",
    "checkpoints.transformers_save_tied_offloaded",
    "checkpoints.transformers_save_offloaded_unified",
    "checkpoints.transformers_shared_kv_weights",
    "generation.transformers_fp16_logits",
    "generation.transformers_assistant_arguments",
    "generation.transformers_assistant_keys",
    "generation.transformers_assistant_sampling",
    "generation.transformers_assisted_turns",
    "generation.transformers_assistant_memory",
    "generation.transformers_static_cache",
    "generation.transformers_image_masks",
    "generation.transformers_vision_masks",
    "generation.transformers_assisted_cache",
    "generation.transformers_static_images",
    "generation.transformers_chunked_media",
    "generation.transformers_chunked_images",
    "generation.transformers_chunked_turns",
    "generation.transformers_held_prompts",
    "generation.transformers_unread_chunks",
    "generation.transformers_sliced_prompts",
    "generation.transformers_absent_per_layer",
    "generation.transformers_expanded_media",
    "generation.transformers_graph_decoding",
    "generation.transformers_image_masks_unified",
    "generation.transformers_reuse_prefix",
    "quantization.bitsandbytes_cpu_packing",
    "quantization.bitsandbytes_fused_dequantization",
    "quantization.transformers_quantized_router",
    "quantization.transformers_tied_head",
    "quantization.transformers_tied_layers",
    "quantization.transformers_quantized_experts",
    "quantization.transformers_quantize_offloaded",
    "quantization.transformers_qat_padding_row",
    "quantization.transformers_compute_dtype",
    "offload.accelerate_move_offloaded",
    "offload.accelerate_cast_offloaded",
    "quantization.accelerate_subclass_offload",
    "multimodal.transformers_lookup_media",
    "multimodal.transformers_image_types",
    "placement.accelerate_map_check",
    "offload.accelerate_paged_layers",
    "checkpoints.accelerate_load_offloaded",
    "checkpoints.transformers_load_4bit_state",
    "training.accelerate_train_offloaded",
    "placement.transformers_tied_split",
    "placement.transformers_embedding_devices",
    "offload.transformers_offloaded_embedding",
    "generation.transformers_embedding_search",
    "generation.transformers_given_per_layer",
    "placement.transformers_tensor_parallel",
    "training.transformers_text_training",
    "training.transformers_unfed_towers",
)


def _area(name: str) -> str:
    return name.partition(".")[0]


def _id(name: str) -> str:
    return name.partition(".")[2].replace("_", "-")


_ROWS = {name: row for row, name in enumerate(STACKED)}
_FIRST_ROWS = {_area(name): row for name, row in reversed(_ROWS.items())}


def _place(name: str) -> tuple[int, bool, str]:
    """The others come before the first stacked one of their area, by name."""
    return _ROWS.get(name, _FIRST_ROWS.get(_area(name), -1)), name in _ROWS, name


#: ``area.file`` of every patch, in the order in which they are applied.
PATCHES = tuple(sorted({*MODULES, *STACKED}, key=_place))
#: The area of each patch: the folder that its file, and its test, are in.
AREA_OF = {_id(name): _area(name) for name in PATCHES}


def areas() -> dict[str, str]:
    """What the patches of each area are for, from the docstring of its folder; empty under ``python -OO``."""
    found = {area: importlib.import_module(f"{__package__}.{area}").__doc__ for area in set(AREA_OF.values())}
    return {area: (text or "").strip().removeprefix("Patches for ").rstrip(".") for area, text in found.items()}


def load() -> tuple[LatePatch | Patch, ...]:
    """Every patch; its file is imported when it is needed, or at once if it was not measured yet."""
    late = [LatePatch(_id(name), tuple(MODULES.get(name, ())), partial(complete, name)) for name in PATCHES]
    return tuple(patch if patch.modules else patch.load() for patch in late)


def complete(name: str) -> Patch:
    """Import a patch file (it imports no upstream library) and complete the patch from docstring, folder and data.

    Raises:
        ValueError: the docstring lacks a section, or what the file declares makes no sense.
    """
    module = importlib.import_module(f"gemma4_compat.patches.{name}")
    patch: Patch = module.PATCH.complete(module)
    documentation = inspect.cleandoc(module.__doc__ or "")
    ordered = RELEASES.get(patch.distribution, [])  # of a library that was never measured
    inside = [release for release in ordered if versions.admits(patch.affected, release)]
    said: dict[str, Any] = _sections(documentation) if documentation else {}  # none under ``python -OO``
    return dataclasses.replace(
        patch,
        area=_area(name),
        documentation=documentation,
        measured=inside[-1] if inside else "",
        targets=tuple(dataclasses.replace(target, known=_known(target, inside, ordered)) for target in patch.targets),
        **said,
    )


def _known(target: Target, inside: Collection[str], ordered: Sequence[str]) -> dict[str, str]:
    """Fingerprint -> the affected releases that have it."""
    found = dict.fromkeys(target.codes, versions.span_text(inside, ordered))
    for code, spans in KNOWN.get(str(target), {}).items():
        if releases := [release for release in versions.in_spans(spans, ordered) if release in inside]:
            found[code] = versions.span_text(releases, ordered)
    return found


def _sections(documentation: str) -> dict[str, str]:
    """The fields of a patch that its file's docstring gives, each as one line."""
    parts = re.split(r"\n\n(Symptom|Cause|Fix|Remove when): ", "\n\n" + documentation)
    named = dict(zip(parts[1::2], parts[2::2]))
    if list(named) != ["Symptom", "Cause", "Fix", "Remove when"]:
        raise ValueError(
            f"the docstring has the sections {list(named)}; it must have Symptom, Cause, Fix and Remove when"
        )
    return {
        "summary": _line(parts[0]),
        "symptom": _line(named["Symptom"]),
        "retire_when": _line(named["Remove when"]).rstrip("."),
    }


def _line(text: str) -> str:
    return " ".join(text.split())
