"""What the tests of the patches for Google's QAT checkpoints share."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._lab import tiny


def has_quantizer() -> bool:
    """Whether the installed transformers reads such checkpoints."""
    try:
        return find_spec("transformers.integrations.gemma_quant") is not None
    except ModuleNotFoundError:
        return False


needs_quantizer = pytest.mark.skipif(
    not has_quantizer(), reason="the installed transformers does not read QAT checkpoints; 5.11 and later do"
)

#: What a map offloads, by the beginning or a part of its entries.
PLACES = {
    "layers": ("layers.0", "layers.5"),
    "towers": ("tower",),
    "embedding": ("embed_tokens",),
    "per-layer embeddings": ("embed_tokens_per_layer",),
    "head": ("lm_head",),
    "everything": ("",),
}


def load(checkpoint: Path, **options: Any) -> Any:
    return tiny.load(checkpoint, **options)


def layout(model: Any, place: str, *, main: Any = "cpu", offloaded: Any = "disk") -> dict[str, Any]:
    """A map that offloads :data:`PLACES`' parts."""
    names = tiny.device_map(model, "none", main=main, offloaded=offloaded)
    return {name: offloaded if any(part in name for part in PLACES[place]) else main for name in names}


def into_host_memory(model: Any, place: str) -> Any:
    """The model, dispatched with parts in host memory and the CPU as what computes."""
    import torch
    from accelerate import dispatch_model

    cpu = torch.device("cpu")
    return dispatch_model(
        model,
        layout(model, place, main=cpu, offloaded="cpu"),
        main_device=cpu,
        skip_keys=tiny.skip_keys(model),
        force_hooks=True,
    )


def adapted(model: Any, **options: Any) -> Any:
    """A PEFT model with a random LoRA."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    settings = {"target_modules": r".*language_model.*(q_proj|up_proj)", "init_lora_weights": False, **options}
    return get_peft_model(model, LoraConfig(r=4, **settings)).eval()
