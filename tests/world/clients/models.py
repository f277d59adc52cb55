"""The tiny model, whole and split, and a processor for it, as clients of the libraries are given them."""

from __future__ import annotations

from typing import Any

from gemma4_compat._lab import tiny
from tests.one_device import modalities

_TOWERS = ("model.vision_tower", "model.audio_tower")
_LAYERS = ("model.language_model.layers.0", "model.language_model.layers.2")
_EMBEDDING = ("model.language_model.embed_tokens", "lm_head")
#: What is offloaded, and to where: "memory" is the code of "cpu" entries on a GPU.
PLACEMENTS = ("towers and layers on disk", "towers and layers in memory", "embedding and towers on disk")


def whole(workspace: Any, quantization: str | None = None) -> Any:
    return tiny.load(workspace.larger(positions=64), quantization, device=workspace.main)


def split(workspace: Any, how: str, quantization: str | None = None) -> Any:
    """The model of :func:`whole`, dispatched as one of :data:`PLACEMENTS` says."""
    import torch
    from accelerate import dispatch_model

    model = whole(workspace, quantization)
    away = _TOWERS + (_EMBEDDING if how.startswith("embedding") else _LAYERS)
    placement = tiny.device_map(model, "none", main=workspace.main, offloaded="disk")
    if how.endswith("disk"):
        return workspace.dispatch_map(model, placement | dict.fromkeys(away, "disk"))
    main = torch.device(workspace.main)
    placement = dict.fromkeys(placement, main) | dict.fromkeys(away, "cpu")
    return dispatch_model(model, placement, main_device=main, skip_keys=model._skip_keys_device_placement)


def processor() -> Any:
    """With a chat template that also takes plain strings, as the published one does."""
    made = modalities.processor()
    parts = "([{'type': 'text', 'text': turn['content']}] if turn['content'] is string else turn['content'])"
    made.chat_template = made.chat_template.replace("turn['content'] %}", f"{parts} %}}", 1)
    made.tokenizer.chat_template = made.chat_template
    return made
