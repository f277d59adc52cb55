"""Tiny Gemma 4 models with random weights, for your own tests: no download and no GPU.

>>> from gemma4_compat import testing
>>> model = testing.tiny_checkpoint("tiny")
>>> adapter = testing.tiny_adapter(model, "tiny-adapter")
>>> model = AutoModelForImageTextToText.from_pretrained(model)
>>> PeftModel.from_pretrained(model, adapter)(**testing.tiny_inputs()).logits.shape
torch.Size([1, 24, 256])

They have the classes and the parts of the released models (per-layer embeddings, KV-shared layers, sliding windows,
towers, experts), about a megabyte of weights, and 256 tokens. Importing this imports no library.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.models import variants
from gemma4_compat._lab import tiny, tiny_adapters, tiny_models

if TYPE_CHECKING:
    import torch

__all__ = ["tiny_adapter", "tiny_checkpoint", "tiny_inputs"]


def tiny_checkpoint(folder: str | os.PathLike[str], variant: str | None = None) -> str:
    """Write a tiny checkpoint (bf16, without tokenizer and processor) and return its folder.

    Args:
        folder: where to; it is made, or it is empty.
        variant: "E2B", "E4B", "12B", "26B-A4B" or "31B", whose configuration is scaled down; default: six layers with
            nearly every part.

    Raises:
        Gemma4CompatError: no variant has that name, or the installed transformers lacks it; or the folder has files.
    """
    if variant is not None and variant not in variants.NAMES:
        raise Gemma4CompatError(f"variant={variant!r} is unknown; give one of {', '.join(variants.NAMES)}")
    return str(tiny_models.build_checkpoint(_empty(folder), variant=variant))


def tiny_adapter(checkpoint: str | os.PathLike[str], folder: str | os.PathLike[str], targets: str = "language") -> str:
    """Write a LoRA of rank 4 for a tiny checkpoint, with weights that have an effect, and return its folder.

    Args:
        checkpoint: what :func:`tiny_checkpoint` returned.
        folder: where to; it is made, or it is empty.
        targets: linear layers of the "language" model, of the "towers", or "all".

    Raises:
        Gemma4CompatError: there is no such kind of targets; or the folder has files.
    """
    if targets not in tiny_adapters.TARGETS:
        raise Gemma4CompatError(f"targets={targets!r} is unknown; give one of {', '.join(tiny_adapters.TARGETS)}")
    return str(tiny_adapters.build_adapter(Path(checkpoint), _empty(folder), targets))


def tiny_inputs(
    device: str | int | torch.device = "cpu", *, text_only: bool = False, variant: str | None = None
) -> dict[str, torch.Tensor]:
    """Arguments of a tiny model's forward or ``generate``: a prompt of 24 tokens, with an image and a sound.

    Args:
        device: where the tensors are.
        text_only: leave out the image and the sound.
        variant: that of the checkpoint. One without an audio tower gets no sound.

    Returns:
        ``input_ids`` and ``attention_mask``, int64 of shape (1, 24), and what the processor gives for media. The same
        ones with every call.

    Raises:
        Gemma4CompatError: no variant has that name.
    """
    if variant is not None and variant not in variants.NAMES:
        raise Gemma4CompatError(f"variant={variant!r} is unknown; give one of {', '.join(variants.NAMES)}")
    return tiny.inputs(device, text_only=text_only, variant=variant)


def _empty(folder: str | os.PathLike[str]) -> Path:
    """The folder as a path.

    Raises:
        Gemma4CompatError: it has files, which would be overwritten.
    """
    path = Path(folder)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise Gemma4CompatError(f"{str(folder)!r} exists and is not an empty folder; give another, or remove it")
    return path
