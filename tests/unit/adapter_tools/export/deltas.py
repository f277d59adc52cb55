"""What an adapter adds to each weight of the base: by PEFT, and by what was exported, decoded as the reader does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from gemma4_compat._gemma4.adapters import translation
from gemma4_compat._lab import tiny

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)")


def by_peft(checkpoint: Path, adapter: Path) -> dict[str, Any]:
    """Module, or module and parameter -> what is added to the weight, in float32; names without containers."""
    from peft import PeftModel
    from peft.tuners.lora.layer import LoraLayer

    model = PeftModel.from_pretrained(tiny.load(checkpoint).float(), adapter).float()
    found = {}
    for path, layer in model.base_model.model.named_modules():
        if isinstance(layer, LoraLayer):
            name = ".".join(translation.shared_part(path.replace(".base_layer", "")))
            parameter = getattr(layer, "parameter_name", "")
            found[f"{name}.{parameter}" if parameter else name] = layer.get_delta_weight("default").detach()
    return found


def of_server(folder: Path) -> dict[str, Any]:
    """Of an export for vLLM or SGLang: the scale is ``lora_alpha / r`` for every module, experts are one by one."""
    import torch
    from safetensors.torch import load_file

    config = json.loads((folder / "adapter_config.json").read_text())
    assert not {"rank_pattern", "alpha_pattern"} & set(config)
    weights = load_file(folder / "adapter_model.safetensors")
    found: dict[str, Any] = {}
    for key in weights:
        if key.endswith(".lora_A.weight"):
            stem = key.removesuffix(".lora_A.weight")
            a, b = weights[key].float(), weights[f"{stem}.lora_B.weight"].float()
            assert a.shape[0] == b.shape[1] == config["r"]
            prefix = "base_model.model.model."
            assert stem.startswith(prefix)
            name = stem.removeprefix(prefix).removeprefix("language_model.")
            found[name] = config["lora_alpha"] / config["r"] * (b @ a)
    assert 2 * len(found) == len(weights)
    experts: dict[str, dict[str, list[Any]]] = {}
    for name in [name for name in found if _EXPERT.fullmatch(name)]:
        layer, number, part = _EXPERT.fullmatch(name).groups()  # type: ignore[union-attr]
        parts = experts.setdefault(layer, {}).setdefault(part, [])
        assert len(parts) == int(number)
        parts.append(found.pop(name))
    for layer, by_part in experts.items():
        stacked = {part: torch.stack(deltas) for part, deltas in by_part.items()}
        found[f"{layer}.gate_up_proj"] = torch.cat([stacked["gate_proj"], stacked["up_proj"]], dim=1)
        found[f"{layer}.down_proj"] = stacked["down_proj"]
    return found


def of_mlx(folder: Path) -> dict[str, Any]:
    """Of an export for mlx: one scale, matrices transposed, gate and up of the experts apart."""
    import torch
    from safetensors.torch import load_file

    config = json.loads((folder / "adapter_config.json").read_text())["lora_parameters"]
    weights = load_file(folder / "adapters.safetensors")
    found: dict[str, Any] = {}
    for path in config["keys"]:
        a, b = weights.pop(f"{path}.lora_a").float(), weights.pop(f"{path}.lora_b").float()
        weights.pop(f"{path}.m", None)
        name = path.removeprefix("language_model.").removeprefix("model.").replace(".switch_glu", "")
        found[name] = config["scale"] * (b @ a if a.ndim == 3 else (a @ b).T)
        assert config["rank"] == (a.shape[1] if a.ndim == 3 else b.shape[0])
    assert not weights
    for name in [name for name in found if name.endswith(".experts.gate_proj")]:
        joined = [found.pop(name), found.pop(name.replace("gate_proj", "up_proj"))]
        found[name.replace("gate_proj", "gate_up_proj")] = torch.cat(joined, dim=1)
    return found
