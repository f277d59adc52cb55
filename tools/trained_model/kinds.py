"""The kinds of Gemma 4 that there are trained models of: what makes each of them different, in small."""

from __future__ import annotations

from typing import Any

#: As in :data:`gemma4_compat._gemma4.models.variants.NAMES`.
NAMES = ("E2B", "12B", "26B-A4B")

#: Vocabulary and special tokens are added by :func:`model.config`.
_TEXT: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 64,
    "max_position_embeddings": 2048,
    "final_logit_softcapping": 30.0,
}
_PERIOD = ["sliding_attention", "sliding_attention", "full_attention"]
#: Keys that are values in full attention, which has its own number of them; attention to and fro inside a picture.
_LARGE: dict[str, Any] = {
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "use_bidirectional_attention": "vision",
}
_TEXTS: dict[str, dict[str, Any]] = {
    # Per-layer embeddings; 3 of 6 layers share keys and values and are twice as wide.
    "E2B": {
        "hidden_size_per_layer_input": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "layer_types": _PERIOD * 2,
        "num_key_value_heads": 1,
    },
    "12B": {**_LARGE, "intermediate_size": 192, "num_hidden_layers": 6, "layer_types": _PERIOD * 2},
    # Two of eight experts beside a dense part in each layer.
    "26B-A4B": {
        **_LARGE,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "layer_types": _PERIOD,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
    },
}
#: 36 patches of 8 by 8 pixels, of which a tower makes 4 soft tokens. The 12B, which has none, gets 4 of 24 by 24.
_PATCHES = {"patch_size": 8, "pooling_kernel_size": 3}
_VISION: dict[str, Any] = {
    **_PATCHES,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "position_embedding_size": 16,
}
_AUDIO: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [128, 16],
    "output_proj_dims": 64,
    "use_clipped_linears": True,
}


def text(kind: str) -> dict[str, Any]:
    """Settings of the language model."""
    return {**_TEXT, **_TEXTS[kind]}


def vision(kind: str) -> dict[str, Any]:
    """Settings of the vision tower, or of the 12B's embedder: the small tower clips, the large one standardizes."""
    if kind == "12B":
        return {**_PATCHES, "mm_embed_dim": 128, "mm_posemb_size": 16, "output_proj_dims": 128}
    return {**_VISION, "use_clipped_linears": True} if kind == "E2B" else {**_VISION, "standardize": True}


def audio(kind: str) -> dict[str, Any] | None:
    """Settings of the audio tower, or of the 12B's embedder of 40 ms as they are; None if the kind hears nothing."""
    return {"E2B": _AUDIO, "12B": {"audio_embed_dim": 640}}.get(kind)
