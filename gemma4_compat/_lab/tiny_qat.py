"""Tiny checkpoints in the formats of Google's quantization-aware-trained Gemma 4.

``build_qat_checkpoint`` writes that of ``quant_method: "gemma"``, ``build_packed_checkpoint`` that of ``w4a16``.

transformers reads the first with its own layers but cannot write it, so the values are rounded and packed here. The
bits follow the released E2B, ``google/gemma-4-E2B-it-qat-mobile-transformers``: two bits for the head,
the embedding and part of the MLPs, four for attention, one scale for each layer's block of the per-layer embeddings,
calibrated activations, and scales for a quantized cache, which transformers ignores.

Upstream is imported only inside functions, so this module may be imported first.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

#: ``module_quant_configs``: the first pattern found in a module's name decides its bits.
BITS: dict[str, int] = {
    r"^lm_head$": 2,
    r"language_model\.embed_tokens$": 2,
    r"language_model\.embed_tokens_per_layer$": 4,
    r"language_model\.layers\.[0-2]\.mlp\.": 4,
    r"language_model\.layers\.\d+\.mlp\.": 2,
    r"language_model\.layers\.\d+\.per_layer_input_gate$": 8,
    r"language_model\.layers\.\d+\.per_layer_projection$": 8,
    r"language_model\.layers\.\d+\.self_attn\.": 4,
    r"vision_tower": 8,
    r"audio_tower(?!.*lconv1d\.linear_start)": 2,
    r"audio_tower\.layers\.\d+\.lconv1d\.linear_start\.": 4,
}
KEPT = (
    "model.vision_tower.patch_embedder",
    "model.audio_tower.subsample_conv_projection",
    "model.audio_tower.output_proj",
    "relative_k_proj",
    "model.embed_audio",
    "model.embed_vision",
    "per_layer_model_projection",
)
#: Activations are rounded to 256 steps of this size; outputs of the head are not rounded.
STEP = 0.05


def build_qat_checkpoint(checkpoint: Path, folder: Path, *, calibrated: bool = True, grouped: bool = True) -> Path:
    """Write the model in ``checkpoint`` (bf16) in that format into ``folder`` and return it.

    Args:
        checkpoint: from :func:`tiny_models.build_checkpoint`.
        folder: is created if missing.
        calibrated: activations are rounded, as in the released models; otherwise their scales are zero.
        grouped: the per-layer embeddings have a scale per row and layer, as in the released models; otherwise one per
            row.
    """
    import torch
    import transformers
    from safetensors.torch import save_file
    from transformers.integrations import gemma_quant
    from transformers.utils.quantization_config import GemmaQuantizationConfig

    from gemma4_compat._lab import tiny_models

    folder.mkdir(parents=True, exist_ok=True)
    cls = getattr(transformers, tiny_models.class_name(checkpoint))
    model = cls.from_pretrained(checkpoint, dtype=torch.bfloat16)
    plain = dict(model.named_modules())
    quantization = GemmaQuantizationConfig(
        num_bits=4,
        quantize_embeddings=True,
        module_quant_configs={pattern: {"num_bits": bits} for pattern, bits in BITS.items()},
        modules_to_not_convert=list(KEPT),
    )
    gemma_quant.replace_with_quant_layers(model, quantization, list(KEPT))
    layers = model.config.get_text_config().num_hidden_layers
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, gemma_quant.QuantizedLinear):
                values, scale = rounded(plain[name].weight, module.num_bits)
                module.weight.data, module.weight_scale.data = pack(values, module.num_bits), scale
                if calibrated:
                    module.input_activation_scale.fill_(STEP)
                    module.output_activation_scale.fill_(0.0 if name == "lm_head" else STEP)
            elif isinstance(module, gemma_quant.QuantizedEmbedding):
                groups = layers if grouped and name.endswith("per_layer") else 1
                values, scale = rounded(plain[name].weight, module.num_bits, groups)
                module.embedding_quantized.data = pack(values, module.num_bits)
                module.embedding_scale.data = scale
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    for index in range(layers):
        for kind in "kv":
            name = f"model.language_model.layers.{index}.self_attn.{kind}_cache_scale"
            tensors[name] = torch.tensor(STEP)
    model.config.quantization_config = quantization
    model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = False
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def build_packed_checkpoint(
    checkpoint: Path,
    folder: Path,
    *,
    bits: int = 4,
    group: int = 32,
    packed: bool = True,
    tensors: dict[str, Any] | None = None,
) -> Path:
    """Write the model in ``checkpoint`` (bf16) as llm-compressor does, ``pack-quantized``, and return ``folder``.

    The linear layers of its language model are quantized, except those whose width is no multiple of ``group``.

    Args:
        checkpoint: from :func:`tiny_models.build_checkpoint`.
        folder: is created if missing.
        bits: of a value, 4 or 8.
        group: columns that share a scale; 0: all of a row.
        packed: False writes the same values in bf16, as a checkpoint that is not quantized.
        tensors: of the model by their names in a checkpoint, in place of those in its file.
    """
    import torch
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = load_file(checkpoint / "model.safetensors") if tensors is None else dict(tensors)
    kept = ["lm_head", "re:.*tower.*", "re:.*embed_.*"]
    for name, weight in list(tensors.items()):
        module = re.fullmatch(r"(?!.*tower)(.*(?:proj|gate|projection))\.weight", name)
        if module is None or weight.ndim != 2 or "embed_" in name:
            continue
        if group and weight.shape[1] % group:
            kept.append(module[1])
            continue
        values, scale = rounded(weight, bits, weight.shape[1] // group if group else 1)
        scale = scale.to(torch.bfloat16)
        tensors[name] = (values.unflatten(1, (scale.shape[1], -1)) * scale[..., None]).flatten(1)
        if packed:
            words = pack(values, bits) if bits < 8 else values.view(torch.uint8) ^ 128
            shape = torch.tensor(tensors.pop(name).shape)
            tensors |= {f"{name}_packed": words.view(torch.int32), f"{name}_scale": scale, f"{name}_shape": shape}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group" if group else "channel"}
    weights |= {"group_size": group or None, "dynamic": False}
    if packed:
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": kept,
        }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def rounded(weight: Any, bits: int, groups: int = 1) -> tuple[Any, Any]:
    """The nearest signed integers of ``bits`` bits, int8 [rows, columns], and their scales, float32 [rows, groups]."""
    import torch

    largest = 2 ** (bits - 1) - 1
    blocks = weight.detach().float().unflatten(1, (groups, -1))
    scale = blocks.abs().amax(-1, keepdim=True) / max(largest, 1)
    values = (blocks / scale).round().clamp(-largest - 1, largest)
    return values.flatten(1).to(torch.int8), scale.squeeze(-1)


def pack(values: Any, bits: int) -> Any:
    """Signed integers of ``bits`` bits, int8 [rows, columns], in their storage format.

    With 2 and 4 bits, 4 and 2 of them per byte, the first lowest, with zero in the middle of the range (uint8). With 8
    bits, int8.
    """
    import torch

    if bits == 8:
        return values
    count = 8 // bits
    unsigned = (values.to(torch.int16) + 2 ** (bits - 1)).unflatten(1, (-1, count))
    places = torch.arange(count, device=values.device) * bits
    return (unsigned << places).sum(-1).to(torch.uint8)
