"""The shapes of the released Gemma 4 models, to plan for a model without its configuration at hand.

Text and vision shapes are those in transformers' own conversion scripts for Gemma 4; everything else (vocabulary, head
width, per-layer inputs, audio) is the configuration classes' default, which the installed transformers decides.
"""

from __future__ import annotations

from types import ModuleType
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


def _text(hidden: int, inner: int, heads: int, kv_heads: int, **others: Any) -> dict[str, Any]:
    widths = {"hidden_size": hidden, "intermediate_size": inner}
    return widths | {"num_attention_heads": heads, "num_key_value_heads": kv_heads} | others


#: What the text models of the two largest have in common.
_LARGE_TEXT = {
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "use_bidirectional_attention": "vision",
    "sliding_window": 1024,
    "max_position_embeddings": 262144,
}
_EXPERTS = {"enable_moe_block": True, "num_experts": 128, "moe_intermediate_size": 704, "top_k_experts": 8}

#: By name: the layer types, the text model's shape, vision, audio.
_SHAPES: dict[str, dict[str, Any]] = {
    "E2B": {
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        "text": _text(1536, 6144, 8, 1, num_kv_shared_layers=20, use_double_wide_mlp=True),
        "vision": _VISION_SMALL,
        "audio": {},
    },
    "E4B": {
        "layer_types": _FIVE_TO_ONE * 7,
        "text": _text(2560, 10240, 8, 2, num_kv_shared_layers=18),
        "vision": _VISION_SMALL,
        "audio": {},
    },
    "12B": {
        "layer_types": _FIVE_TO_ONE * 8,
        "text": _text(3840, 15360, 16, 8, num_global_key_value_heads=1, attention_k_eq_v=True),
        "vision": {},
        "audio": {},
    },
    "26B-A4B": {
        "layer_types": _FIVE_TO_ONE * 5,
        "text": _text(2816, 2112, 16, 8, num_global_key_value_heads=2, **_LARGE_TEXT, **_EXPERTS),
        "vision": _VISION_LARGE,
        "audio": None,
    },
    "31B": {
        "layer_types": _FIVE_TO_ONE * 10,
        "text": _text(5376, 21504, 32, 16, num_global_key_value_heads=4, **_LARGE_TEXT),
        "vision": _VISION_LARGE,
        "audio": None,
    },
}

#: The variants' names.
NAMES = tuple(_SHAPES)
#: The one whose classes are transformers' ``gemma4_unified``.
UNIFIED = "12B"

#: What a plan for a variant takes for granted; a plan for a checkpoint does not.
ASSUMED = "shapes as in transformers' conversion script, the rest at the configuration classes' defaults"


def find(name: str) -> str | None:
    """The variant a user means by ``name`` ("e4b", "gemma-4-E4B-it", "google/gemma-4-E4B"); None for no variant."""
    plain = name.rpartition("/")[2].lower().removeprefix("gemma-4-").removesuffix("-it")
    return next((variant for variant in NAMES if variant.lower() == plain), None)


def shape(name: str) -> dict[str, Any]:
    """What is known about a variant: ``layer_types``, ``text``, ``vision``, ``audio`` (None: no audio tower)."""
    return _SHAPES[name]


#: What only some variants have, in words.
PARTS = {
    "per_layer_embeddings": "per-layer embeddings",
    "shared_keys_and_values": "layers that share keys and values",
    "experts": "experts",
    "vision_tower": "vision tower",
    "audio_tower": "audio tower",
    "clipped_linears": "linears that are wrapped to be clipped",
    "gemma4": "classes of the other variants (gemma4)",
    "unified": "classes of its own (gemma4_unified)",
}


def parts(name: str) -> set[str]:
    """Which of :data:`PARTS` a variant has."""
    text, unified = _SHAPES[name]["text"], name == UNIFIED
    has = {
        "per_layer_embeddings": not unified and text.get("hidden_size_per_layer_input") != 0,
        "shared_keys_and_values": bool(text.get("num_kv_shared_layers")),
        "experts": bool(text.get("enable_moe_block")),
        "vision_tower": not unified,
        "audio_tower": not unified and _SHAPES[name]["audio"] is not None,
        "clipped_linears": not unified,  # the wrapper is there even with its clipping off
        "gemma4": not unified,
        "unified": unified,
    }
    return {part for part, there in has.items() if there}


def unified_classes() -> ModuleType:
    """``transformers``, if it has the classes of :data:`UNIFIED`; otherwise raises :class:`Gemma4CompatError`."""
    import transformers

    if not hasattr(transformers, "Gemma4UnifiedConfig"):
        raise Gemma4CompatError(
            f"the {UNIFIED} is a gemma4_unified model, which transformers {transformers.__version__} does not have; "
            "install 5.10 or newer"
        )
    found: ModuleType = transformers
    return found


def config(name: str, *, layers: int | None = None) -> Any:
    """The ``Gemma4Config`` (12B: ``Gemma4UnifiedConfig``) of a variant; with ``layers``, of only its first layers.

    Raises:
        Gemma4CompatError: the installed transformers has no such model.
    """
    shape = _SHAPES[name]
    layer_types = list(shape["layer_types"])[:layers]
    text = {
        **shape["text"],
        "layer_types": layer_types,
        "num_hidden_layers": len(layer_types),
        "final_logit_softcapping": 30.0,
    }
    if name == UNIFIED:
        classes = unified_classes()
        return classes.Gemma4UnifiedConfig(
            text_config=classes.Gemma4UnifiedTextConfig(**text),
            vision_config=classes.Gemma4UnifiedVisionConfig(**shape["vision"]),
            audio_config=classes.Gemma4UnifiedAudioConfig(**shape["audio"]),
        )
    from transformers.models.gemma4 import configuration_gemma4 as gemma4

    return gemma4.Gemma4Config(
        text_config=gemma4.Gemma4TextConfig(**text),
        vision_config=gemma4.Gemma4VisionConfig(**shape["vision"]),
        audio_config=None if shape["audio"] is None else gemma4.Gemma4AudioConfig(**shape["audio"]),
    )
