"""Layers quantized by quanto. Imports nothing upstream at module level."""

from __future__ import annotations

from typing import Any


def is_quantized(module: Any) -> bool:
    """Whether quanto packed this layer's own weight."""
    weight = vars(module).get("_parameters", {}).get("weight")
    return type(weight).__module__.startswith("optimum.quanto")


def dequantized(module: Any) -> Any:
    """The weight of such a layer in float32."""
    return module.weight.dequantize().detach().float()
