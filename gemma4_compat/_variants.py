"""The shapes of the released Gemma 4 models, so that one can be planned for without its configuration at hand.

Text and vision shapes are the ones transformers' own conversion scripts for Gemma 4 hold; everything else (vocabulary,
head width, per-layer inputs, audio) is the configuration classes' default, which the installed transformers decides.
"""

from __future__ import annotations

from typing import Any

from gemma4_compat._errors import Gemma4CompatError

_VISION_SMALL = {"use_clipped_linears": True}
_VISION_LARGE = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 72,
    "standardize": True,
}
_FIVE_TO_ONE = ["sliding_attention"] * 5 + ["full_attention"]

#: By name: the layer types, the text model's shape, vision, audio.
_SHAPES: dict[str, dict[str, Any]] = {
    "E2B": {
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        "text": {
            "hidden_size": 1536,
            "intermediate_size": 6144,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 20,
            "use_double_wide_mlp": True,
        },
        "vision": _VISION_SMALL,
        "audio": {},
    },
    "E4B": {
        "layer_types": _FIVE_TO_ONE * 7,
        "text": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "num_kv_shared_layers": 18,
        },
        "vision": _VISION_SMALL,
        "audio": {},
    },
    "12B": {
        "layer_types": _FIVE_TO_ONE * 8,
        "text": {
            "hidden_size": 3840,
            "intermediate_size": 15360,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
        },
        "vision": {},
        "audio": {},
    },
    "26B-A4B": {
        "layer_types": _FIVE_TO_ONE * 5,
        "text": {
            "hidden_size": 2816,
            "hidden_size_per_layer_input": 0,
            "intermediate_size": 2112,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "use_bidirectional_attention": "vision",
            "enable_moe_block": True,
            "num_experts": 128,
            "moe_intermediate_size": 704,
            "top_k_experts": 8,
            "sliding_window": 1024,
            "max_position_embeddings": 262144,
        },
        "vision": _VISION_LARGE,
        "audio": None,
    },
    "31B": {
        "layer_types": _FIVE_TO_ONE * 10,
        "text": {
            "hidden_size": 5376,
            "hidden_size_per_layer_input": 0,
            "intermediate_size": 21504,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "num_global_key_value_heads": 4,
            "attention_k_eq_v": True,
            "use_bidirectional_attention": "vision",
            "sliding_window": 1024,
            "max_position_embeddings": 262144,
        },
        "vision": _VISION_LARGE,
        "audio": None,
    },
}

#: The variants' names.
NAMES = tuple(_SHAPES)

#: What a plan for a variant takes for granted; a plan for a checkpoint does not.
ASSUMED = "shapes as in transformers' conversion script, the rest at the configuration classes' defaults"


def find(name: str) -> str | None:
    """The variant a user means by ``name`` ("e4b", "gemma-4-E4B-it", "google/gemma-4-E4B"); None for no variant."""
    plain = name.rpartition("/")[2].lower().removeprefix("gemma-4-").removesuffix("-it")
    return next((variant for variant in NAMES if variant.lower() == plain), None)


def config(name: str) -> Any:
    """The ``Gemma4Config`` (12B: ``Gemma4UnifiedConfig``) of a variant.

    Raises:
        Gemma4CompatError: the installed transformers has no such model.
    """
    shape = _SHAPES[name]
    text = {
        **shape["text"],
        "layer_types": list(shape["layer_types"]),
        "num_hidden_layers": len(shape["layer_types"]),
        "final_logit_softcapping": 30.0,
    }
    if name == "12B":
        try:
            from transformers import (
                Gemma4UnifiedAudioConfig,
                Gemma4UnifiedConfig,
                Gemma4UnifiedTextConfig,
                Gemma4UnifiedVisionConfig,
            )
        except ImportError as error:
            import transformers

            raise Gemma4CompatError(
                f"the 12B is a gemma4_unified model, which transformers {transformers.__version__} does not have; "
                "install 5.10 or newer"
            ) from error
        return Gemma4UnifiedConfig(
            text_config=Gemma4UnifiedTextConfig(**text),
            vision_config=Gemma4UnifiedVisionConfig(**shape["vision"]),
            audio_config=Gemma4UnifiedAudioConfig(**shape["audio"]),
        )
    from transformers.models.gemma4 import configuration_gemma4 as gemma4

    return gemma4.Gemma4Config(
        text_config=gemma4.Gemma4TextConfig(**text),
        vision_config=gemma4.Gemma4VisionConfig(**shape["vision"]),
        audio_config=None if shape["audio"] is None else gemma4.Gemma4AudioConfig(**shape["audio"]),
    )
