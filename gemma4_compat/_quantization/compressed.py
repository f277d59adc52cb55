"""Layers of compressed-tensors checkpoints. Imports nothing upstream at module level."""

from __future__ import annotations

from typing import Any

#: What to do instead of what such layers cannot do.
DEQUANTIZE = (
    "load it with quantization_config=transformers.CompressedTensorsConfig(dequantize=True): plain weights with the "
    "same outputs, which can be offloaded and adapted"
)


def is_compressed(module: Any) -> bool:
    """Whether this is a linear layer whose weight compressed-tensors stores, compressed or, after a forward, not."""
    status = getattr(module, "quantization_status", None)
    return type(status).__module__.startswith("compressed_tensors")
