"""Whether a model, a configuration or a module belongs to the Gemma 4 family, or is made of the same parts.

Other families of transformers have copies of Gemma 4's parts in their own files: DiffusionGemma (5.11.0 and newer) and
EmbeddingGemma 2 (5.19.0 and newer). What is about placing, quantizing, adapting and saving weights asks
:func:`has_parts`; what is about Gemma 4's own forwards, caches and ``generate`` asks :func:`is_gemma4`.

Imports nothing upstream.
"""

from __future__ import annotations

from typing import Any


def is_gemma4(model: Any) -> bool:
    """Whether the configuration says that the model, or the one inside a PEFT model, is a Gemma 4 of any class."""
    return is_gemma4_config(getattr(model, "config", None))


def is_gemma4_config(config: Any) -> bool:
    """Whether this is the configuration of any Gemma 4 model, or of its text model."""
    return str(getattr(config, "model_type", "")).startswith("gemma4")


def is_gemma4_module(module: Any) -> bool:
    """Whether a module is one of Gemma 4's, according to its class: modules have no ``model_type``."""
    return any(kind.__name__.startswith("Gemma4") for kind in type(module).__mro__)


def has_parts(model: Any) -> bool:
    """Whether the model, or the one inside a PEFT model, is a Gemma 4 or is made of its parts."""
    return has_parts_config(getattr(model, "config", None))


def has_parts_config(config: Any) -> bool:
    """Whether this configuration says so: its model, a tower or its text model is a Gemma 4's, or the heads of full
    attention are wider than those of sliding layers.
    """
    if config is None or is_gemma4_config(config):
        return config is not None
    inner = (getattr(config, name, None) for name in ("text_config", "vision_config", "audio_config"))
    return _has_wide_heads(config) or any(is_gemma4_config(part) or _has_wide_heads(part) for part in inner)


def _has_wide_heads(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None) or ()
    if not {"full_attention", "sliding_attention"} <= set(kinds):
        return False
    by_layer = getattr(config, "per_layer_config", None)
    if by_layer is None:
        narrow = getattr(config, "head_dim", None)
    else:  # then the configuration itself refuses to say it
        narrow = getattr(by_layer[kinds.index("sliding_attention")], "head_dim", None)
    return narrow is not None and (width_of_full_attention(config) or narrow) > narrow


def width_of_full_attention(config: Any) -> int | None:
    """The width of a head in full attention, of a text configuration; None if it does not say."""
    found = getattr(config, "global_head_dim", None)  # before transformers 5.15
    if found is None and "full_attention" in (getattr(config, "layer_types", None) or ()):
        by_layer = getattr(config, "per_layer_config", None)
        found = by_layer and getattr(by_layer[config.layer_types.index("full_attention")], "head_dim", None)
    return found or None
