"""Layers of compressed-tensors checkpoints and of quanto. Imports nothing upstream at module level."""

from __future__ import annotations

from typing import Any

#: The remedy for operations that layers of compressed-tensors do not support.
DEQUANTIZE = (
    "load it with quantization_config=transformers.CompressedTensorsConfig(dequantize=True): plain weights with the "
    "same outputs, which can be offloaded and adapted"
)


def is_compressed(module: Any) -> bool:
    """Whether this is a layer of compressed-tensors whose weight the first forward decompresses."""
    status = getattr(module, "quantization_status", None)
    return type(status).__module__.startswith("compressed_tensors")


def is_packed(module: Any) -> bool:
    """Whether this is a linear layer of compressed-tensors that stays packed, a ``packed_linear.PackedLinear``."""
    return type(module).__name__ == "PackedLinear"


def is_quanto(module: Any) -> bool:
    """Whether quanto packed this layer's own weight."""
    weight = vars(module).get("_parameters", {}).get("weight")
    return type(weight).__module__.startswith("optimum.quanto")


def dequantized(module: Any) -> Any:
    """The weight of a layer of quanto, or of one that stays packed, in float32."""
    return module.weight.dequantize().detach().float()
