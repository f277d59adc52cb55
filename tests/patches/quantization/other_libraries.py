"""Tiny Gemma 4 checkpoints of other quantization libraries; each needs its library."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GROUP = 32
#: What GPTQ and AWQ checkpoints keep in bf16.
KEPT = [
    "lm_head",
    *(f"model.{name}" for name in ("vision_tower", "audio_tower", "embed_vision", "embed_audio")),
    "per_layer_model_projection",
]
#: Where AWQ puts eight values of 4 bits in an int32.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def plain(checkpoint: Path) -> Any:
    import torch
    import transformers

    return transformers.Gemma4ForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()


def build_compressed(checkpoint: Path, folder: Path) -> None:
    """4-bit groups, packed, by llm-compressor's own round-to-nearest."""
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    model = plain(checkpoint)
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    ignored = ["re:.*lm_head", "re:.*tower.*", "re:.*embed_.*"]
    oneshot(model=model, recipe=QuantizationModifier(config_groups=groups, ignore=ignored))
    model.save_pretrained(folder, save_compressed=True)


def build_gptq(checkpoint: Path, folder: Path) -> None:
    """4 bits, symmetric, rounded to nearest, packed by gptqmodel."""
    import torch
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    model = plain(checkpoint)
    for name, module in _linears(model):
        weight = module.weight.data.float()
        scale = (_blocks(weight).abs().amax(-1) / 7).clamp(min=1e-6)
        packed = TorchLinear(
            bits=4,
            group_size=GROUP,
            sym=True,
            desc_act=False,
            in_features=module.in_features,
            out_features=module.out_features,
            bias=False,
            pack_dtype=torch.int32,
            register_buffers=True,
        )
        groups = torch.arange(module.in_features, dtype=torch.int32) // GROUP
        packed.pack_original(module.float(), scale, torch.full_like(scale, 8), groups)
        model.set_submodule(name, packed)
    settings = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "sym": True,
        "desc_act": False,
        "checkpoint_format": "gptq",
        "block_name_to_quantize": "model.language_model.layers",
    }
    _save(model, dict(model.state_dict()), settings, folder)


def build_awq(checkpoint: Path, folder: Path) -> None:
    """4 bits with zero points, rounded to nearest, packed as AWQ's "gemm" version."""
    model = plain(checkpoint)
    tensors = dict(model.state_dict())
    for name, module in _linears(model):
        weight = module.weight.data.float()
        blocks = _blocks(weight)
        low, high = blocks.amin(-1), blocks.amax(-1)
        scale = ((high - low) / 15).clamp(min=1e-6)
        zero = (-low / scale).round().clamp(0, 15)
        values = ((blocks / scale[..., None]).round() + zero[..., None]).clamp(0, 15).reshape(weight.shape)
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.qweight": _packed(values.T), f"{name}.qzeros": _packed(zero.T)}
        tensors[f"{name}.scales"] = scale.T.half()
    settings = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    _save(model, tensors, {**settings, "modules_to_not_convert": KEPT}, folder)


def _linears(model: Any) -> Iterator[tuple[str, Any]]:
    import torch

    for name, module in list(model.named_modules()):
        if type(module) is torch.nn.Linear and "language_model.layers" in name:
            yield name, module


def _blocks(weight: Any) -> Any:
    return weight.unflatten(1, (-1, GROUP))


def _packed(values: Any) -> Any:
    """Integers from 0 to 15, of shape ``(rows, columns)``, as int32 ``(rows, columns / 8)``."""
    import torch

    packed = torch.zeros(values.shape[0], values.shape[1] // 8, dtype=torch.int32)
    for place, first in enumerate(AWQ_ORDER):
        packed |= values[:, first::8].to(torch.int32) << (4 * place)
    return packed


def _save(model: Any, tensors: dict[str, Any], settings: dict[str, Any], folder: Path) -> None:
    from safetensors.torch import save_file

    tensors.pop("lm_head.weight")  # tied
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    model.config.save_pretrained(folder)
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**config, "quantization_config": settings}), encoding="utf-8")


#: Row of the table in docs/QUANTIZATION.md -> what has to be installed, and what writes the checkpoint.
BUILDERS = {
    "GPTQ": (("gptqmodel", "optimum"), build_gptq),
    "AWQ": (("gptqmodel", "optimum"), build_awq),
    "compressed-tensors": (("compressed_tensors", "llmcompressor"), build_compressed),
    "compressed-tensors, dequantized": (("compressed_tensors", "llmcompressor"), build_compressed),
}
