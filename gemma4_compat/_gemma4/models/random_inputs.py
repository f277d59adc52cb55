"""Inputs of random values for a Gemma 4 of any size and class: the same on every machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gemma4_compat._gemma4.models.inspection import input_device


def plain_tokens(config: Any) -> Any:
    """Token ids that no setting of a model's configuration names, int64: at most the first 65,536."""
    import torch

    text = config.get_text_config()
    special = set()
    for name, value in (*vars(config).items(), *vars(text).items()):
        if name.endswith(("token_id", "token_index")):
            special |= set(value if isinstance(value, list) else [value])
    return torch.tensor([token for token in range(3, min(text.vocab_size, 65536)) if token not in special])


def text_batch(config: Any, ids: Any) -> dict[str, Any]:
    """What the forward takes for ``ids``, shape (1, tokens), int64."""
    import torch

    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if any(getattr(config, f"{tower}_config", None) is not None for tower in ("vision", "audio")):
        batch["mm_token_type_ids"] = torch.zeros_like(ids)
    return batch


def add_image(config: Any, batch: dict[str, Any], place: slice, generator: Any) -> None:
    """Put an image into a :func:`text_batch`, which ``place`` has four soft tokens for."""
    import torch

    vision = config.vision_config
    # The unified model has no tower: what arrives is pooled already.
    if config.model_type == "gemma4_unified":
        edge, pixels = 2, vision.patch_size * vision.pooling_kernel_size
    else:
        edge, pixels = 2 * vision.pooling_kernel_size, vision.patch_size
    side = torch.arange(edge)
    grid = torch.stack(torch.meshgrid(side, side, indexing="xy"), dim=-1).reshape(1, edge**2, 2)
    batch["pixel_values"] = torch.rand(1, edge**2, 3 * pixels**2, generator=generator)
    batch["image_position_ids"] = grid
    batch["input_ids"][0, place], batch["mm_token_type_ids"][0, place] = config.image_token_id, 1


def add_sound(config: Any, batch: dict[str, Any], place: slice, generator: Any) -> None:
    """The same for a sound."""
    import torch

    audio = config.audio_config
    unified = config.model_type == "gemma4_unified"
    frames, width = (4, audio.audio_embed_dim) if unified else (16, audio.subsampling_conv_channels[0])
    batch["input_features"] = torch.randn(1, frames, width, generator=generator)
    batch["input_features_mask"] = torch.ones(1, frames, dtype=torch.bool)
    batch["input_ids"][0, place], batch["mm_token_type_ids"][0, place] = config.audio_token_id, 3


def on(model: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """``batch`` where the model wants it."""
    device = input_device(model)
    return {name: value.to(device) if hasattr(value, "to") else value for name, value in batch.items()}
