"""Layers of compressed-tensors checkpoints. Imports nothing upstream at module level."""

from __future__ import annotations

from typing import Any

#: The remedy for operations that such layers do not support.
DEQUANTIZE = (
    "load it with quantization_config=transformers.CompressedTensorsConfig(dequantize=True): plain weights with the "
    "same outputs, which can be offloaded and adapted"
)


def is_compressed(module: Any) -> bool:
    """Whether this is a linear layer of compressed-tensors; its weight is decompressed by the first forward."""
    status = getattr(module, "quantization_status", None)
    return type(status).__module__.startswith("compressed_tensors")
