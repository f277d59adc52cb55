"""Adapters to merge, good and broken ones, and what their merge by PEFT gives."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from gemma4_compat._gemma4.checkpoint import shards
from gemma4_compat._lab import tiny

LANGUAGE = r".*language_model\.layers\.[024]\..*\.(q_proj|o_proj|down_proj)"


def randomized(model: Any, *, scale: float = 0.2) -> Any:
    """Weights in everything an adapter trains."""
    import torch

    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = scale * torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise.to(parameter.dtype))
    return model


def make(checkpoint: Path, folder: Path, config: Any, *, scale: float = 0.2) -> Path:
    """An adapter of that configuration, with random weights."""
    import torch
    from peft import get_peft_model

    torch.manual_seed(0)
    randomized(get_peft_model(tiny.load(checkpoint), config), scale=scale).save_pretrained(folder)
    return folder


def merged_by_peft(checkpoint: Path, adapter: Path, *, untied: bool = False) -> dict[str, Any]:
    """The whole model merged by PEFT in float32, then rounded to bf16.

    ``untied``: the head gets its own copy of the embedding first; PEFT writes what it merges into the one to both.
    """
    import torch
    import transformers
    from peft import PeftModel
    from transformers import AutoConfig

    wanted = getattr(transformers, AutoConfig.from_pretrained(checkpoint).architectures[0])
    model = wanted.from_pretrained(checkpoint, dtype=torch.float32)
    if untied:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    loaded = PeftModel.from_pretrained(model, adapter)
    for key, entry in shards.entries(adapter / "adapter_model.safetensors").items():
        name = key.removeprefix("base_model.")
        if name in ("vera_A", "vera_B"):  # PEFT 0.19.1 makes them again from the key, in the model's dtype
            getattr(loaded.base_model, name)["default"].copy_(shards.read(entry))
    merged = loaded.merge_and_unload(safe_merge=True)
    return {name: value.to(torch.bfloat16) for name, value in merged.state_dict().items()}


def tensors(folder: Path) -> dict[str, Any]:
    return {name: shards.read(entry) for name, entry in shards.checkpoint(folder).items()}


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    import torch

    assert not set(found) - set(wanted)
    assert set(wanted) - set(found) <= {"lm_head.weight"}
    different = [name for name, value in found.items() if not torch.equal(value, wanted[name])]
    assert not different


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir() if file.is_file()}


def broken(folder: Path, how: str) -> None:
    """Spoil an adapter."""
    import torch
    from safetensors.torch import load_file, save_file

    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    values, data = load_file(weights), json.loads(config.read_text())
    first = next(key for key in values if "lora_B" in key)
    if how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif how == "no header":
        weights.write_bytes(b"not safetensors at all")
    elif how == "pickle":
        torch.save(values, folder / "adapter_model.bin")
        weights.unlink()
    elif how == "rank":
        config.write_text(json.dumps(data | {"r": 3}))
    elif how == "shape":
        save_file(values | {first: torch.zeros(7, 4)}, weights)
    elif how == "type":
        config.write_text(json.dumps(data | {"peft_type": "NEWTUNER"}))
    elif how == "prompt":
        config.write_text(json.dumps(data | {"peft_type": "PROMPT_TUNING"}))
    elif how == "shared":
        config.write_text(json.dumps(data | {"peft_type": "XLORA"}))
    elif how == "other model":
        save_file({key.replace("q_proj", "query"): value for key, value in values.items() if "q_proj" in key}, weights)
    elif how == "some keys":
        save_file(values | {"base_model.model.transformer.h.0.attn.lora_A.weight": torch.zeros(4, 4)}, weights)
    elif how == "half a module":
        save_file({key: value for key, value in values.items() if key != first}, weights)
    elif how == "nan":
        save_file(values | {first: torch.full_like(values[first], float("nan"))}, weights)
    elif how in ("overlap", "gap", "gap at the start", "unknown dtype"):
        reheadered(weights, how)
    elif how == "no layer":
        ends = sorted({name.rpartition(".")[2] for name in data["target_modules"]})  # with whole paths it counts not
        config.write_text(json.dumps(data | {"target_modules": ends, "layers_to_transform": [999]}))
    elif how == "other targets":
        config.write_text(json.dumps(data | {"target_modules": ["q_proj"]}))
    elif how == "no config":
        config.unlink()
    elif how == "no JSON":
        config.write_text("{")
    elif how == "empty":
        save_file({}, weights)


def reheadered(file: Path, how: str) -> None:
    """Spoil the layout of a safetensors file."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    entries, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    names = sorted(
        (name for name in entries if name != "__metadata__"), key=lambda name: entries[name]["data_offsets"]
    )
    if how == "overlap":
        entries[names[1]] = entries[names[0]]
    elif how == "unknown dtype":
        entries[names[0]]["dtype"] = "I3"
    else:
        moved = names if how == "gap at the start" else names[2:]
        for name in moved:
            entries[name]["data_offsets"] = [offset + 8 for offset in entries[name]["data_offsets"]]
        first = entries[moved[0]]["data_offsets"][0] - 8
        data = data[:first] + bytes(8) + data[first:]
    header = json.dumps(entries).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + data)
