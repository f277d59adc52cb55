"""Configurations of tiny Gemma 4 models, with the real configuration classes.

The shape keeps the parts that break: clipped linears in vision and audio towers, layers that share keys and values,
per-layer embeddings, tied head, sliding and full attention. Linear widths suit bitsandbytes on the CPU (inputs are a
multiple of 64, outputs a multiple of 32).

Upstream is imported only inside functions, so this module may be imported first.
"""

from __future__ import annotations

from typing import Any

from gemma4_compat._gemma4.models import variants

IMAGE_TOKEN, AUDIO_TOKEN, VIDEO_TOKEN, VOCABULARY = 250, 251, 252, 256

#: Text model: layers of width 64, the last 2 of them KV-shared.
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_kv_shared_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 8,
    "max_position_embeddings": 256,
    "final_logit_softcapping": 30.0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
LAYER_TYPES = ["sliding_attention", "sliding_attention", "full_attention"]
#: Settings of each variant's text model: the larger variants have no KV-shared layers and no per-layer embeddings.
_LARGE: dict[str, Any] = {
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "use_bidirectional_attention": "vision",
}
TEXT_VARIANTS: dict[str, dict[str, Any]] = {
    "E2B": {},
    "31B": _LARGE,
    "26B-A4B": {**_LARGE, "enable_moe_block": True, "num_experts": 4, "moe_intermediate_size": 64, "top_k_experts": 2},
}
VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "patch_size": 8,
    "position_embedding_size": 16,
    "pooling_kernel_size": 3,
}
AUDIO: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [128, 2],
    "output_proj_dims": 64,
    "use_clipped_linears": True,
}
_UNIFIED_VISION: dict[str, Any] = {
    "patch_size": 8,
    "pooling_kernel_size": 3,
    "mm_embed_dim": 64,
    "mm_posemb_size": 16,
    "output_proj_dims": 64,
}
_UNIFIED_SAMPLES = 128  # audio samples per token
_TOKENS: dict[str, Any] = {
    "image_token_id": IMAGE_TOKEN,
    "audio_token_id": AUDIO_TOKEN,
    "video_token_id": VIDEO_TOKEN,
    "boi_token_id": 253,
    "eoi_token_id": 254,
    "boa_token_id": 255,
    "eoa_token_index": 249,
    "tie_word_embeddings": True,
}


def text_shape(layers: int = 6) -> dict[str, Any]:
    """:data:`TEXT` with ``layers`` layers, a multiple of 3."""
    return {**TEXT, "num_hidden_layers": layers, "layer_types": LAYER_TYPES * (layers // 3)}


def config(
    layers: int = 6,
    *,
    per_layer_vocabulary: int = VOCABULARY,
    positions: int = 16,
    text_variant: str = "E2B",
    variant: str | None = None,
    full_width: int = TEXT["global_head_dim"],
    width: int = TEXT["hidden_size"],
) -> Any:
    """A ``Gemma4Config``: 2 vision and 2 audio layers, and the text model of :func:`text_shape`.

    With ``variant`` (one of :data:`variants.NAMES`), that variant's own configuration scaled down, see
    :func:`scaled_text`.

    Args:
        layers: of the text model.
        per_layer_vocabulary: rows of the per-layer embeddings.
        positions: patches that an image may have per side.
        text_variant: a key of :data:`TEXT_VARIANTS`.
        variant: a released variant instead of the above.
        full_width: width of a head in full attention; 512 in released models.
        width: of the text model's layers; the root of 64 is an integer, that of a released width is not.

    Raises:
        Gemma4CompatError: the installed transformers has no such variant.
    """
    from transformers.models.gemma4 import configuration_gemma4 as gemma4

    sizes = {"global_head_dim": full_width, "hidden_size": width}
    if variant is not None:
        return _scaled(variant, layers, per_layer_vocabulary, sizes)
    inputs = {"vocab_size_per_layer_input": per_layer_vocabulary, "hidden_size_per_layer_input": 64}
    text = {**text_shape(layers), **inputs, **sizes, **TEXT_VARIANTS[text_variant]}
    return gemma4.Gemma4Config(
        text_config=gemma4.Gemma4TextConfig(**text),
        vision_config=gemma4.Gemma4VisionConfig(
            **{**VISION, "position_embedding_size": positions}, use_clipped_linears=True
        ),
        audio_config=gemma4.Gemma4AudioConfig(**AUDIO),
        **_TOKENS,
    )


def _scaled(variant: str, layers: int, per_layer_vocabulary: int, sizes: dict[str, int]) -> Any:
    shape = variants.shape(variant)
    text = scaled_text(shape, layers) | sizes
    if variant == variants.UNIFIED:
        classes = variants.unified_classes()
        return classes.Gemma4UnifiedConfig(
            text_config=classes.Gemma4UnifiedTextConfig(**text),
            vision_config=classes.Gemma4UnifiedVisionConfig(**_UNIFIED_VISION),
            audio_config=classes.Gemma4UnifiedAudioConfig(audio_embed_dim=_UNIFIED_SAMPLES),
            **_TOKENS,
        )
    from transformers.models.gemma4 import configuration_gemma4 as gemma4

    if shape["text"].get("hidden_size_per_layer_input") != 0:
        text |= {"hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": per_layer_vocabulary}
    return gemma4.Gemma4Config(
        text_config=gemma4.Gemma4TextConfig(**text),
        vision_config=gemma4.Gemma4VisionConfig(**{**shape["vision"], **VISION}),
        audio_config=None if shape["audio"] is None else gemma4.Gemma4AudioConfig(**AUDIO),
        **_TOKENS,
    )


def scaled_text(shape: dict[str, Any], layers: int) -> dict[str, Any]:
    """The settings of a variant's text model, scaled down.

    Every switch keeps its value, and so does the pattern of layers: one period, two if layers share keys and values
    (the second period shares), more to reach ``layers``. Head counts keep the variant's order of full attention's
    key-value heads, sliding attention's key-value heads and query heads.
    """
    real = shape["text"]
    period = shape["layer_types"].index("full_attention") + 1
    shares = "num_kv_shared_layers" in real
    rounds = max(2 if shares else 1, -(-layers // period))
    text = {
        **real,
        **TEXT,
        "num_kv_shared_layers": period if shares else 0,
        "num_attention_heads": 2 * min(real["num_key_value_heads"], 2),
        "num_key_value_heads": min(real["num_key_value_heads"], 2),
        "num_hidden_layers": rounds * period,
        "layer_types": shape["layer_types"][:period] * rounds,
    }
    small = {"num_global_key_value_heads": 1, "num_experts": 32, "top_k_experts": 2, "moe_intermediate_size": 64}
    return text | {name: value for name, value in small.items() if name in real}


def moe_config(layers: int = 3) -> Any:
    """A ``Gemma4Config`` like the 26B-A4B's: 32 experts (2 per token), keys used as values, no per-layer inputs, no
    KV-shared layers, no audio; ``layers`` is a multiple of 3.
    """
    from transformers.models.gemma4 import configuration_gemma4 as gemma4

    shape = text_shape(layers) | {
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 32,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
    }
    other = config()
    return gemma4.Gemma4Config(
        text_config=gemma4.Gemma4TextConfig(**shape),
        vision_config=other.vision_config,
        audio_config=None,
        **{
            name: getattr(other, name) for name in ("image_token_id", "video_token_id", "boi_token_id", "eoi_token_id")
        },
        tie_word_embeddings=True,
    )
