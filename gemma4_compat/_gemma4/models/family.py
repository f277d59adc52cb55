"""Whether a model, a configuration or a module belongs to the Gemma 4 family. Imports nothing upstream."""

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
