"""Tiny LoRA adapters for the tiny models, saved the way PEFT saves them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from gemma4_compat._lab import tiny

#: Adapter targets by what they cover. In the towers they match clipped linears, wrappers that PEFT does not support.
TARGETS: dict[str, str] = {
    "language": r".*language_model\..*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)",
    "towers": r".*(vision_tower|audio_tower)\..*\.(q_proj|k_proj|v_proj|gate_proj|down_proj|ffw_layer_1)",
    "all": r".*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj|ffw_layer_1)",
}
#: The same for the 12B, which has multimodal embedders instead of towers.
_UNIFIED_TARGETS = {
    **TARGETS,
    "towers": r".*\.(patch_dense|embedding_projection)",
    "all": r".*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj|patch_dense|embedding_projection)",
}


#: A few linears of the language model's decoder layers, for tuners that are slow on all of them.
SOME_LINEARS = r".*language_model\.layers\.\d+\.(self_attn\.q_proj|mlp\.up_proj)"


def tuned(model: Any, config: Any) -> Any:
    """``model`` with a new PEFT adapter whose weights are changed so that it has an effect."""
    import peft
    import torch

    torch.manual_seed(0)
    tuned = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for value in tuned.parameters():
            if value.requires_grad:
                value.add_(0.02)
    return tuned


def build_adapter(checkpoint: Path, folder: Path, targets: str = "language", *, rank: int = 4, seed: int = 1) -> Path:
    """Write a LoRA adapter with non-zero weights for ``TARGETS[targets]`` into ``folder`` and return it.

    Wrapper targets are written on the inner ``.linear``, as in published adapters; that needs no patch.
    """
    model = tiny.load(checkpoint)
    wrapped = {name for name, module in model.named_modules() if type(module).__name__ == "Gemma4ClippableLinear"}
    pattern = (_UNIFIED_TARGETS if type(model).__name__.startswith("Gemma4Unified") else TARGETS)[targets]
    matched = [name for name, _ in model.named_modules() if re.fullmatch(pattern, name)]
    return write_adapter(
        model, [f"{name}.linear" if name in wrapped else name for name in matched], folder, rank, seed
    )


def write_adapter(model: Any, targets: Any, folder: Path, rank: int = 4, seed: int = 1, **options: Any) -> Path:
    """Write a LoRA adapter with non-zero weights for ``target_modules=targets`` of ``model``; ``options`` go to its
    config.
    """
    import torch
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, **options)
    peft_model = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    peft_model.save_pretrained(folder)
    return folder
