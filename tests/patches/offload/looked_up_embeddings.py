"""Models with offloaded embeddings, and what the tests of ``accelerate-embedding-lookup`` compare of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gemma4_compat._gemma4.accelerate import module_hooks as _placement
from gemma4_compat._lab import tiny
from gemma4_compat._offload.transfer import row_lookup

EMBEDDING, PER_LAYER = "model.language_model.embed_tokens", "model.language_model.embed_tokens_per_layer"
WEIGHTS = {"per layer": (PER_LAYER,), "all": (PER_LAYER, EMBEDDING, "lm_head")}


def split(workspace: Any, *offloaded: str, quantization: str | None = None) -> Any:
    model = workspace.load(quantization)
    placement = tiny.device_map(model, "none", main=workspace.main, offloaded=workspace.offloaded)
    return workspace.dispatch_map(model, placement | dict.fromkeys(offloaded, workspace.offloaded))


def from_disk(workspace: Any, folder: Path, *offloaded: str, checkpoint: Path | None = None) -> Any:
    """Loaded with a map: the weights stay in the checkpoint's safetensors file."""
    placement = tiny.device_map(workspace.load(), "none", main=workspace.main, offloaded="disk")
    placement |= dict.fromkeys(offloaded, "disk")
    return tiny.load(checkpoint or workspace.checkpoint, device_map=placement, offload_folder=folder)


def lookups(model: Any) -> list[str]:
    """The embeddings that have been looked up where they live."""
    return [
        name
        for name, module in model.named_modules()
        if getattr(_placement.offload_hook(module), row_lookup._STATE, None) is not None
    ]


def embedding_of(model: Any, name: str = PER_LAYER) -> Any:
    return next(module for path, module in model.named_modules() if path.endswith(name))


def assert_equal_gradients(whole: dict[str, Any], other: dict[str, Any]) -> None:
    import torch

    assert whole
    assert whole.keys() == other.keys()
    assert not [name for name, value in whole.items() if not torch.equal(value, other[name])]
