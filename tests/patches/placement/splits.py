"""Tiny models with their embeddings or their head offloaded, in each of the ways in which users come to one."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gemma4_compat._lab import tiny

EMBEDDING, HEAD = "model.language_model.embed_tokens", "lm_head"
PER_LAYER = "model.language_model.embed_tokens_per_layer"
#: ``ram``: with values for which accelerate treats the CPU like an accelerator, offloaded to host memory.
KINDS = ("disk", "ram", "from_pretrained")


def split(
    workspace: Any,
    kind: str,
    offloaded: Iterable[str],
    folder: Path | None,
    quantization: str | None = None,
    *,
    model: Any = None,
) -> Any:
    """A model on the CPU with the modules of these names offloaded; ``model`` or a new one."""
    import torch
    from accelerate import dispatch_model

    main: Any = torch.device("cpu") if kind == "ram" else "cpu"
    where = "cpu" if kind == "ram" else "disk"
    model = workspace.load(quantization) if model is None else model
    placement = tiny.device_map(model, "none", main=main, offloaded=where) | dict.fromkeys(offloaded, where)
    if kind == "from_pretrained":
        return tiny.load(workspace.checkpoint, device_map=placement, offload_folder=folder)
    skip = tiny.skip_keys(model)
    options = {"main_device": main} if kind == "ram" else {"offload_dir": folder}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dispatch_model(model, placement, skip_keys=skip, **options)
