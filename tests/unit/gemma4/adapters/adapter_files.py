"""Adapters made up from a configuration and a safetensors header; their weights are holes in a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

PREFIX = "base_model.model."
LORA: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
_SIZES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1}


def write_adapter(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    config: Mapping[str, Any] | None = None,
    *,
    dtype: str = "F32",
) -> Path:
    """An adapter of these keys and shapes, every value zero."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(LORA if config is None else dict(config)))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, shape in shapes.items():
        begin, end = end, end + prod(shape) * _SIZES[dtype]
        entries[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    with (folder / "adapter_model.safetensors").open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + end)
    return folder


def lora(*modules: str, rank: int = 4, width: int = 64, prefix: str = PREFIX) -> dict[str, tuple[int, ...]]:
    """The keys and shapes of LoRA on square layers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for module in modules:
        shapes[f"{prefix}{module}.lora_A.weight"] = (rank, width)
        shapes[f"{prefix}{module}.lora_B.weight"] = (width, rank)
    return shapes


def as_in_the_forum_thread() -> dict[str, tuple[int, ...]]:
    """The 786 keys of an E2B adapter in the wild: 35 layers with all seven linears, keys and values of the KV-shared
    ones too, and the towers on their inner ``.linear``.
    """
    mlp = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    linears = [*(f"self_attn.{name}_proj" for name in "qkvo"), *mlp]
    modules = [f"model.language_model.layers.{layer}.{name}" for layer in range(35) for name in linears]
    modules += [f"model.vision_tower.encoder.layers.{layer}.{name}.linear" for layer in range(16) for name in linears]
    modules += [
        f"model.audio_tower.layers.{layer}.self_attn.{name}_proj.linear" for layer in range(12) for name in "qkv"
    ]
    return lora(*modules)
