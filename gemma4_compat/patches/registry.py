"""Every patch, in the order in which patches of one module are applied. One line a patch, no discovery."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from gemma4_compat._engine import versions
from gemma4_compat._engine.patch import LatePatch, Patch, Target
from gemma4_compat.patches.measured import KNOWN, MODULES, RELEASES

#: ``area.file``
PATCHES: tuple[str, ...] = (
    "offload.accelerate_hf_initialized",
    "offload.accelerate_int8_offload",
    "placement.accelerate_skip_keys",
    "placement.accelerate_nested_map",
    "placement.accelerate_tied_devices",
    "offload.accelerate_tied_on_disk",
    "offload.accelerate_remove_hooks",
    "offload.accelerate_offload_folder",
    "adapters.accelerate_dispatch_adapters",
    "offload.accelerate_move_offloaded",
    "offload.accelerate_cast_offloaded",
    "quantization.accelerate_subclass_offload",
    "placement.accelerate_map_check",
    "placement.accelerate_split_buffers",
    "offload.accelerate_disk_buffers",
    "offload.accelerate_load_tied",
    "offload.accelerate_embedding_lookup",
    "offload.accelerate_paged_layers",
    "checkpoints.accelerate_load_offloaded",
    "checkpoints.accelerate_save_state_offloaded",
    "training.accelerate_train_offloaded",
    "training.accelerate_ddp_offloaded",
    "offload.bitsandbytes_meta_quant_state",
    "quantization.bitsandbytes_cpu_packing",
    "quantization.bitsandbytes_cpu_strides",
    "offload.bitsandbytes_int8_meta_scales",
    "checkpoints.bitsandbytes_int8_load_state",
    "quantization.bitsandbytes_int8_strides",
    "quantization.bitsandbytes_int8_notice",
    "training.bitsandbytes_fsdp_packed_weights",
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
    "checkpoints.peft_save_offloaded",
    "training.peft_kbit_dtypes",
    "adapters.peft_quantized_experts",
    "adapters.peft_quantized_tuners",
    "adapters.peft_changed_base",
    "training.peft_adalora_unused",
    "training.peft_adalora_devices",
    "adapters.peft_adalora_ranks",
    "adapters.transformers_failed_adapter",
    "adapters.peft_cache_name",
    "adapters.peft_prefix_placement",
    "adapters.peft_unilora_frod",
    "adapters.peft_shared_devices",
    "adapters.peft_input_devices",
    "adapters.peft_hotswap_offloaded",
    "adapters.peft_virtual_tokens",
    "adapters.transformers_peft_release",
    "adapters.transformers_adapter_placement",
    "training.transformers_uncached_sharing",
    "placement.transformers_shared_kv",
    "training.transformers_rotary_order",
    "training.transformers_rotary_cast",
    "generation.transformers_assistant_sharing",
    "generation.transformers_assistant_arguments",
    "generation.transformers_offloaded_cache",
    "generation.transformers_static_cache",
    "training.transformers_cudnn_padding",
    "training.transformers_flash_attention",
    "generation.transformers_image_masks",
    "generation.transformers_vision_masks",
    "generation.transformers_sliding_cache",
    "generation.transformers_assisted_cache",
    "generation.transformers_static_chunks",
    "generation.transformers_paged_cache",
    "generation.transformers_static_images",
    "generation.transformers_chunked_media",
    "generation.transformers_chunked_images",
    "generation.transformers_expanded_media",
    "generation.transformers_generate_embeddings",
    "multimodal.transformers_quantized_vision",
    "multimodal.transformers_vision_dtype",
    "multimodal.transformers_quantized_audio",
    "multimodal.transformers_quantized_vision_unified",
    "multimodal.transformers_quantized_audio_unified",
    "multimodal.transformers_fp16_vision",
    "multimodal.transformers_audio_dtype",
    "multimodal.transformers_audio_autocast",
    "multimodal.transformers_audio_attention",
    "multimodal.transformers_audio_mask",
    "placement.transformers_placement_names",
    "placement.transformers_auto_map",
    "quantization.transformers_quantized_router",
    "quantization.transformers_tied_head",
    "quantization.transformers_quantized_experts",
    "quantization.transformers_quantize_offloaded",
    "quantization.transformers_qat_loading",
    "quantization.transformers_qat_saving",
    "quantization.transformers_qat_padding_row",
    "quantization.transformers_qat_dequantize",
    "training.transformers_qat_gradients",
    "quantization.transformers_compute_dtype",
    "placement.transformers_map_boundaries",
    "checkpoints.transformers_text_only_checkpoint",
    "checkpoints.transformers_resave_quantized",
    "checkpoints.transformers_save_tied_offloaded",
    "checkpoints.transformers_save_offloaded_unified",
    "checkpoints.transformers_shared_kv_weights",
    "checkpoints.transformers_config_names",
    "checkpoints.transformers_config_reads",
    "checkpoints.transformers_renaming_patterns",
    "placement.transformers_tied_split",
    "placement.transformers_per_layer_devices",
    "placement.transformers_embedding_devices",
    "placement.transformers_resize_offloaded",
    "offload.transformers_offloaded_embedding",
    "generation.transformers_embedding_search",
    "generation.transformers_given_per_layer",
    "placement.transformers_tensor_parallel",
    "offload.transformers_model_device",
    "offload.transformers_pipeline_device",
    "generation.transformers_graph_decoding",
    "generation.transformers_deferred_stop",
    "adapters.transformers_dequantized_adapter",
    "training.transformers_reentrant_checkpointing",
    "training.transformers_wide_heads",
    "training.transformers_text_training",
    "training.transformers_unfed_towers",
    "training.transformers_zero3_buffers",
    "training.transformers_chunked_loss",
    "training.transformers_accumulation_weights",
)


_AREAS = {file.replace("_", "-"): folder for folder, file in (name.split(".") for name in PATCHES)}


def area(patch_id: str) -> str:
    """What a patch is about: the folder its file, and its test, are in.

    Raises:
        KeyError: no patch has that id.
    """
    return _AREAS[patch_id]


def load() -> tuple[LatePatch | Patch, ...]:
    """Every patch, its file imported when it is needed. One that was not measured yet is imported at once."""
    late = [LatePatch(id=patch_id, modules=MODULES.get(patch_id, ()), load=_loader(patch_id)) for patch_id in _AREAS]
    return tuple(patch if patch.modules else patch.load() for patch in late)


def _loader(patch_id: str) -> Callable[[], Patch]:
    return lambda: _complete(patch_id)


def _complete(patch_id: str) -> Patch:
    """Import a patch file (it imports no upstream library) and add what its docstring, its folder and the data say.

    Raises:
        ValueError: the file holds another patch, or its docstring lacks a section.
    """
    name = f"gemma4_compat.patches.{_AREAS[patch_id]}.{patch_id.replace('-', '_')}"
    module = importlib.import_module(name)
    patch: Patch = module.PATCH
    if patch.id != patch_id:
        raise ValueError(f"{name} holds the patch {patch.id!r}; its id must be its file's name")
    documentation = inspect.cleandoc(module.__doc__ or "")
    ordered = RELEASES[patch.distribution]
    inside = [release for release in ordered if versions.admits(patch.affected, release)]
    said: dict[str, Any] = _sections(documentation) if documentation else {}  # none under ``python -OO``
    return dataclasses.replace(
        patch,
        area=_AREAS[patch_id],
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
    """What a patch file's docstring says of it, by field of the patch, each as one line."""
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
