"""Settings of a text model that transformers writes per layer from 5.15.0 on, under the names that other readers use.

``global_head_dim`` is the head size of full attention, and ``num_global_key_value_heads`` its number of key-value
heads (null: the same as in the other layers), as in released ``config.json`` files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Name -> the setting of a full-attention layer that it stands for.
NAMES = {"global_head_dim": "head_dim", "num_global_key_value_heads": "num_key_value_heads"}


def restored(text: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that ``text``, a text model's part of ``config.json``, has per layer and not by name.

    Empty if it has no settings per layer, or has some that these names cannot express: full-attention layers that
    differ from each other, or other layers with settings of their own.
    """
    layers, kinds = text.get("per_layer_config"), text.get("layer_types")
    if not isinstance(layers, Mapping) or not isinstance(kinds, list) or "full_attention" not in kinds:
        return {}
    try:
        own = {int(index): dict(settings) for index, settings in layers.items()}
    except (TypeError, ValueError):
        return {}
    full = {index for index, kind in enumerate(kinds) if kind == "full_attention"}
    said = [own.get(index, {}) for index in full]
    if any(settings != said[0] for settings in said) or set(own) - full or set(said[0]) - set(NAMES.values()):
        return {}
    found = {
        "global_head_dim": said[0].get("head_dim", text.get("head_dim")),
        "num_global_key_value_heads": said[0].get("num_key_value_heads"),
    }
    return {name: value for name, value in found.items() if name not in text}


def of(config: Any) -> dict[str, Any]:
    """The old names and their values, from a text model's configuration that keeps them per layer. Empty if it has no
    settings per layer, or has some that the names cannot express.
    """
    own = vars(config)
    by_layer = own.get("_heterogeneity_spec")
    if by_layer is None:
        return {}
    layers = {"per_layer_config": by_layer.per_layer_overrides}
    return restored(layers | {name: own.get(name) for name in ("layer_types", "head_dim")})


def set_on(config: Any, name: str, value: Any) -> None:
    """Set a setting by its old name on the full-attention layers of a configuration for which :func:`of` has it."""
    own = vars(config)
    layers = {index: dict(settings) for index, settings in own["_heterogeneity_spec"].per_layer_overrides.items()}
    setting = NAMES[name]
    for index in (index for index, kind in enumerate(own["layer_types"]) if kind == "full_attention"):
        layers.setdefault(index, {})[setting] = own[setting] if value is None else value
    config.per_layer_config = layers
