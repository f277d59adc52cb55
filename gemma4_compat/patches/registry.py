"""Every patch, by area. One line a patch, no discovery."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import resources
from typing import Any

from gemma4_compat._engine import versions
from gemma4_compat._engine.patch import LatePatch, Patch, Target

_MEASURED = json.loads(resources.files(__package__).joinpath("measured.json").read_text(encoding="utf-8"))
#: The measured releases of each library, oldest first.
RELEASES: dict[str, list[str]] = _MEASURED["releases"]
#: Patch -> the modules of its targets: its file is imported when one of them is.
MODULES: dict[str, list[str]] = _MEASURED["modules"]
#: Target -> fingerprint -> the releases that have that code.
KNOWN: dict[str, dict[str, str]] = _MEASURED["known"]
#: Patch -> errors of its reproduction without the shim.
RAISED: dict[str, list[str]] = _MEASURED["raised"]

#: Area -> its patch files, in the order in which patches of one function are applied: a later one is on top.
AREAS: Mapping[str, tuple[str, ...]] = {
    "multimodal": (
        "transformers_quantized_vision",
        "transformers_vision_dtype",
        "transformers_quantized_audio",
        "transformers_quantized_vision_unified",
        "transformers_quantized_audio_unified",
        "transformers_fp16_vision",
        "transformers_fp16_vision_unified",
        "transformers_fp16_padding",
        "transformers_audio_dtype",
        "transformers_audio_autocast",
        "transformers_audio_attention",
        "transformers_audio_mask",
    ),
    "training": (
        "accelerate_ddp_offloaded",
        "bitsandbytes_fsdp_packed_weights",
        "peft_kbit_dtypes",
        "peft_adalora_unused",
        "peft_adalora_devices",
        "transformers_uncached_sharing",
        "transformers_rotary_order",
        "transformers_rotary_cast",
        "transformers_cudnn_padding",
        "transformers_sliding_windows",
        "transformers_flash_attention",
        "transformers_packed_texts",
        "transformers_attention_weights",
        "transformers_qat_gradients",
        "transformers_reentrant_checkpointing",
        "transformers_generate_checkpointing",
        "transformers_checkpointing_options",
        "transformers_checkpointed_states",
        "transformers_wide_heads",
        "transformers_zero3_buffers",
        "transformers_chunked_loss",
        "transformers_chunked_mlp",
        "transformers_accumulation_weights",
    ),
    "placement": (
        "accelerate_skip_keys",
        "accelerate_nested_map",
        "accelerate_tied_devices",
        "accelerate_split_buffers",
        "transformers_shared_kv",
        "transformers_placement_names",
        "transformers_auto_map",
        "transformers_map_boundaries",
        "transformers_per_layer_devices",
        "transformers_resize_offloaded",
    ),
    "offload": (
        "accelerate_hf_initialized",
        "accelerate_int8_offload",
        "accelerate_tied_on_disk",
        "accelerate_remove_hooks",
        "accelerate_offload_folder",
        "accelerate_disk_buffers",
        "accelerate_load_tied",
        "accelerate_embedding_lookup",
        "bitsandbytes_meta_quant_state",
        "bitsandbytes_int8_meta_scales",
        "transformers_model_device",
        "transformers_pipeline_device",
    ),
    "adapters": (
        "accelerate_dispatch_adapters",
        "peft_adapter_load",
        "peft_adapter_keys",
        "peft_failed_load",
        "peft_keep_dispatch",
        "peft_offloaded_inits",
        "peft_clippable_linear",
        "transformers_adapter_keys",
        "peft_quantized_merge",
        "peft_merge_offloaded",
        "peft_tied_merge",
        "peft_qat_merge",
        "peft_resized_vocabulary",
        "peft_quantized_experts",
        "peft_quantized_tuners",
        "peft_changed_base",
        "peft_adalora_ranks",
        "transformers_failed_adapter",
        "peft_cache_name",
        "peft_prefix_placement",
        "peft_unilora_frod",
        "peft_shared_devices",
        "peft_input_devices",
        "peft_hotswap_offloaded",
        "peft_virtual_tokens",
        "peft_adapter_names",
        "peft_frozen_adapters",
        "transformers_adapter_names",
        "transformers_peft_release",
        "transformers_adapter_placement",
        "transformers_dequantized_adapter",
    ),
    "checkpoints": (
        "accelerate_save_state_offloaded",
        "bitsandbytes_int8_load_state",
        "peft_save_offloaded",
        "transformers_text_only_checkpoint",
        "transformers_resave_quantized",
        "transformers_save_tied_offloaded",
        "transformers_save_offloaded_unified",
        "transformers_shared_kv_weights",
        "transformers_config_names",
        "transformers_config_reads",
    ),
    "generation": (
        "transformers_fp16_logits",
        "transformers_assistant_sharing",
        "transformers_assistant_arguments",
        "transformers_assistant_keys",
        "transformers_assistant_sampling",
        "transformers_assisted_turns",
        "transformers_assistant_memory",
        "transformers_assistant_offloaded",
        "transformers_offloaded_cache",
        "transformers_static_cache",
        "transformers_image_masks",
        "transformers_vision_masks",
        "transformers_sliding_cache",
        "transformers_assisted_cache",
        "transformers_draft_windows",
        "transformers_early_exit",
        "transformers_static_chunks",
        "transformers_paged_cache",
        "transformers_static_images",
        "transformers_chunked_media",
        "transformers_chunked_images",
        "transformers_chunked_turns",
        "transformers_held_prompts",
        "transformers_unread_chunks",
        "transformers_sliced_prompts",
        "transformers_absent_per_layer",
        "transformers_expanded_media",
        "transformers_generate_embeddings",
        "transformers_graph_decoding",
        "transformers_image_masks_unified",
        "transformers_deferred_stop",
        "transformers_reuse_prefix",
    ),
    "quantization": (
        "bitsandbytes_cpu_packing",
        "bitsandbytes_cpu_strides",
        "bitsandbytes_int8_strides",
        "bitsandbytes_int8_notice",
        "bitsandbytes_fused_dequantization",
        "transformers_quantized_router",
        "transformers_tied_head",
        "transformers_quantized_experts",
        "transformers_quantize_offloaded",
        "transformers_qat_loading",
        "transformers_qat_saving",
        "transformers_qat_padding_row",
        "transformers_qat_dequantize",
        "transformers_compute_dtype",
    ),
}

#: ``area.file``: on top of patches of the same function that are in other areas, in this order.
ON_TOP: tuple[str, ...] = (
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

#: ``area.file`` of every patch, in the order in which they are applied.
PATCHES: tuple[str, ...] = (*(f"{area}.{file}" for area, files in AREAS.items() for file in files), *ON_TOP)

#: The area of each patch.
AREA_OF = {file.replace("_", "-"): folder for folder, file in (name.split(".") for name in PATCHES)}


def area(patch_id: str) -> str:
    """The area of a patch: the folder that its file, and its test, are in.

    Raises:
        KeyError: no patch has that id.
    """
    return AREA_OF[patch_id]


def load() -> tuple[LatePatch | Patch, ...]:
    """Every patch; its file is imported when it is needed, or at once if it was not measured yet."""
    late = [LatePatch(patch_id, tuple(MODULES.get(patch_id, ())), _loader(patch_id)) for patch_id in AREA_OF]
    return tuple(patch if patch.modules else patch.load() for patch in late)


def _loader(patch_id: str) -> Callable[[], Patch]:
    return lambda: _complete(patch_id)


def _complete(patch_id: str) -> Patch:
    """Import a patch file (it imports no upstream library) and complete the patch from docstring, folder and data.

    Raises:
        ValueError: the docstring lacks a section, or what the file declares makes no sense.
    """
    module = importlib.import_module(f"gemma4_compat.patches.{AREA_OF[patch_id]}.{patch_id.replace('-', '_')}")
    patch: Patch = module.PATCH.complete(module)
    documentation = inspect.cleandoc(module.__doc__ or "")
    ordered = RELEASES.get(patch.distribution, [])  # of a library that was never measured
    inside = [release for release in ordered if versions.admits(patch.affected, release)]
    said: dict[str, Any] = _sections(documentation) if documentation else {}  # none under ``python -OO``
    return dataclasses.replace(
        patch,
        area=AREA_OF[patch_id],
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
