"""Every patch, in the order in which patches of one module are applied. One line a patch, no discovery."""

from __future__ import annotations

import importlib

from gemma4_compat._patch import Patch

PATCHES: tuple[str, ...] = (
    "accelerate_hf_initialized",
    "accelerate_int8_offload",
    "accelerate_skip_keys",
    "accelerate_nested_map",
    "accelerate_tied_on_disk",
    "accelerate_remove_hooks",
    "accelerate_offload_folder",
    "accelerate_move_offloaded",
    "accelerate_map_check",
    "accelerate_embedding_lookup",
    "accelerate_paged_layers",
    "accelerate_train_offloaded",
    "bitsandbytes_meta_quant_state",
    "bitsandbytes_cpu_packing",
    "bitsandbytes_cpu_strides",
    "bitsandbytes_int8_meta_scales",
    "bitsandbytes_int8_strides",
    "peft_adapter_keys",
    "peft_failed_load",
    "peft_keep_dispatch",
    "peft_clippable_linear",
    "transformers_adapter_keys",
    "peft_quantized_merge",
    "peft_kbit_dtypes",
    "peft_quantized_experts",
    "peft_quantized_tuners",
    "peft_changed_base",
    "peft_adalora_unused",
    "peft_adalora_ranks",
    "transformers_failed_adapter",
    "transformers_adapter_placement",
    "transformers_uncached_sharing",
    "transformers_shared_kv",
    "transformers_shared_kv_unified",
    "transformers_rotary_order",
    "transformers_rotary_order_unified",
    "transformers_assistant_sharing",
    "transformers_assistant_sharing_unified",
    "transformers_assistant_arguments",
    "transformers_offloaded_cache",
    "transformers_static_cache",
    "transformers_vision_masks",
    "transformers_sliding_cache",
    "transformers_assisted_cache",
    "transformers_static_chunks",
    "transformers_static_images",
    "transformers_chunked_media",
    "transformers_chunked_images",
    "transformers_quantized_vision",
    "transformers_vision_dtype",
    "transformers_quantized_audio",
    "transformers_quantized_vision_unified",
    "transformers_quantized_audio_unified",
    "transformers_fp16_vision",
    "transformers_audio_dtype",
    "transformers_audio_autocast",
    "transformers_audio_attention",
    "transformers_audio_mask",
    "transformers_save_offloaded_unified",
    "transformers_placement_names",
    "transformers_auto_map",
    "transformers_quantized_router",
    "transformers_quantized_experts",
    "transformers_quantize_offloaded",
    "transformers_map_boundaries",
    "transformers_text_only_checkpoint",
    "transformers_tied_split",
    "transformers_offloaded_embedding",
    "transformers_dequantized_adapter",
    "transformers_reentrant_checkpointing",
)


def load() -> tuple[Patch, ...]:
    """Import the patch files (they import no upstream library) and check what only the whole set can show.

    Raises:
        ValueError: a patch's id is not its file's name, or ``after`` names a patch that does not come before it.
    """
    patches: list[Patch] = []
    for name in PATCHES:
        patch: Patch = importlib.import_module(f"gemma4_compat.patches.{name}").PATCH
        if patch.id != name.replace("_", "-"):
            raise ValueError(f"patches/{name}.py holds the patch {patch.id!r}; its id must be its file's name")
        unknown = set(patch.after) - {earlier.id for earlier in patches}
        if unknown:
            raise ValueError(
                f"{patch.id}: after names {', '.join(sorted(unknown))}, which is not registered before it"
            )
        patches.append(patch)
    return tuple(patches)
