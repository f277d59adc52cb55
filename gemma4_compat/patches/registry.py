"""Every patch, in the order in which patches of one module are applied. One line a patch, no discovery."""

from __future__ import annotations

import importlib

from gemma4_compat._engine.patch import Patch

PATCHES: tuple[str, ...] = (
    "offload.accelerate_hf_initialized",
    "offload.accelerate_int8_offload",
    "placement.accelerate_skip_keys",
    "placement.accelerate_nested_map",
    "offload.accelerate_tied_on_disk",
    "offload.accelerate_remove_hooks",
    "offload.accelerate_offload_folder",
    "offload.accelerate_move_offloaded",
    "placement.accelerate_map_check",
    "offload.accelerate_embedding_lookup",
    "offload.accelerate_paged_layers",
    "training.accelerate_train_offloaded",
    "offload.bitsandbytes_meta_quant_state",
    "quantization.bitsandbytes_cpu_packing",
    "quantization.bitsandbytes_cpu_strides",
    "offload.bitsandbytes_int8_meta_scales",
    "quantization.bitsandbytes_int8_strides",
    "adapters.peft_adapter_keys",
    "adapters.peft_failed_load",
    "adapters.peft_keep_dispatch",
    "adapters.peft_clippable_linear",
    "adapters.transformers_adapter_keys",
    "adapters.peft_quantized_merge",
    "training.peft_kbit_dtypes",
    "adapters.peft_quantized_experts",
    "adapters.peft_quantized_tuners",
    "adapters.peft_changed_base",
    "training.peft_adalora_unused",
    "adapters.peft_adalora_ranks",
    "adapters.transformers_failed_adapter",
    "adapters.transformers_adapter_placement",
    "training.transformers_uncached_sharing",
    "placement.transformers_shared_kv",
    "placement.transformers_shared_kv_unified",
    "training.transformers_rotary_order",
    "training.transformers_rotary_order_unified",
    "generation.transformers_assistant_sharing",
    "generation.transformers_assistant_sharing_unified",
    "generation.transformers_assistant_arguments",
    "generation.transformers_offloaded_cache",
    "generation.transformers_static_cache",
    "generation.transformers_vision_masks",
    "generation.transformers_sliding_cache",
    "generation.transformers_assisted_cache",
    "generation.transformers_static_chunks",
    "generation.transformers_static_images",
    "generation.transformers_chunked_media",
    "generation.transformers_chunked_images",
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
    "checkpoints.transformers_save_offloaded_unified",
    "placement.transformers_placement_names",
    "placement.transformers_auto_map",
    "quantization.transformers_quantized_router",
    "quantization.transformers_quantized_experts",
    "quantization.transformers_quantize_offloaded",
    "placement.transformers_map_boundaries",
    "checkpoints.transformers_text_only_checkpoint",
    "placement.transformers_tied_split",
    "offload.transformers_offloaded_embedding",
    "adapters.transformers_dequantized_adapter",
    "training.transformers_reentrant_checkpointing",
)


def area(patch_id: str) -> str:
    """What a patch is about: the folder its file, and its test, are in.

    Raises:
        KeyError: no patch has that id.
    """
    return {file.replace("_", "-"): folder for folder, file in (name.split(".") for name in PATCHES)}[patch_id]


def load() -> tuple[Patch, ...]:
    """Import the patch files (they import no upstream library) and check what only the whole set can show.

    Raises:
        ValueError: a patch's id is not its file's name, or ``after`` names a patch that does not come before it.
    """
    patches: list[Patch] = []
    for name in PATCHES:
        patch: Patch = importlib.import_module(f"gemma4_compat.patches.{name}").PATCH
        if patch.id != name.rpartition(".")[2].replace("_", "-"):
            raise ValueError(
                f"patches/{name.replace('.', '/')}.py holds the patch {patch.id!r}; its id must be its file's name"
            )
        unknown = set(patch.after) - {earlier.id for earlier in patches}
        if unknown:
            raise ValueError(
                f"{patch.id}: after names {', '.join(sorted(unknown))}, which is not registered before it"
            )
        patches.append(patch)
    return tuple(patches)
