"""Tiny models of other families that are made of Gemma 4's parts: DiffusionGemma and EmbeddingGemma 2.

Upstream is imported only inside functions, so this module may be imported first.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gemma4_compat._engine.patch import FORWARDS
from gemma4_compat._lab import tiny_configs, tiny_models
from gemma4_compat._lab.workspace import MissingPartError, Outputs

DIFFUSION, EMBEDDING = "DiffusionGemmaForBlockDiffusion", "EmbeddingGemma2Model"
CANVAS = 8
_TEXT: dict[str, Any] = {
    **{name: tiny_configs.TEXT[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim")},
    **{name: tiny_configs.TEXT[name] for name in ("global_head_dim", "sliding_window", "max_position_embeddings")},
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "num_hidden_layers": 3,
    "layer_types": tiny_configs.LAYER_TYPES,
}
_PICTURES = {"image_token_id": tiny_configs.IMAGE_TOKEN, "boi_token_id": 253, "eoi_token_id": 254}


def diffusion_config(**text: Any) -> Any:
    """A ``DiffusionGemmaConfig``: experts in every layer, keys used as values in full attention, a vision tower."""
    transformers = _needs("DiffusionGemmaConfig")
    experts = {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64}
    shape = {**_TEXT, **experts, "use_bidirectional_attention": "vision", **text}
    return transformers.DiffusionGemmaConfig(
        text_config=transformers.DiffusionGemmaTextConfig(**shape),
        vision_config=transformers.Gemma4VisionConfig(**tiny_configs.VISION),
        canvas_length=CANVAS,
        **_PICTURES,
    )


def embedding_config(**text: Any) -> Any:
    """An ``EmbeddingGemma2Config``: per-layer inputs without a lookup, a vision and an audio tower."""
    transformers = _needs("EmbeddingGemma2Config")
    return transformers.EmbeddingGemma2Config(
        text_config=transformers.EmbeddingGemma2TextConfig(
            **{**_TEXT, "hidden_size_per_layer_input": 64, "embedding_dim": 96, **text}
        ),
        vision_config=transformers.Gemma4VisionConfig(**tiny_configs.VISION),
        audio_config=transformers.Gemma4AudioConfig(**tiny_configs.AUDIO),
        audio_token_id=tiny_configs.AUDIO_TOKEN,
        video_token_id=tiny_configs.VIDEO_TOKEN,
        **_PICTURES,
    )


_CONFIGS = {DIFFUSION: diffusion_config, EMBEDDING: embedding_config}


def build(folder: Path, *, name: str = DIFFUSION) -> Path:
    """Write a model of the class ``name`` (bf16, random weights) into ``folder`` and return it.

    Raises:
        MissingPartError: the installed transformers has no such model.
    """
    import torch

    torch.manual_seed(0)
    model = tiny_models.randomized(getattr(_needs(name), name)(_CONFIGS[name]()))
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.ndim == 1 and not path.endswith("per_dim_scale"):
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def build_untied_diffusion(folder: Path) -> Path:
    """Write the DiffusionGemma of :func:`build` with a copy for each tied weight, and return ``folder``."""
    import torch
    from safetensors.torch import save_file

    build(folder)
    transformers = _needs(DIFFUSION)
    model = getattr(transformers, DIFFUSION).from_pretrained(folder, dtype=torch.bfloat16)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    settings["tie_word_embeddings"] = settings["text_config"]["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def load_relative(
    checkpoint: Path,
    quantization: str | None = None,
    *,
    device: Any = "cpu",
    device_map: Any = None,
    skip_modules: list[str] | None = None,
    **options: Any,
) -> Any:
    """Load one of these models through ``from_pretrained``, in eval mode, with transformers' own skip list unless one
    is given.
    """
    import torch
    import transformers

    if quantization is not None:
        kind: dict[str, Any] = {"load_in_8bit": True}
        if quantization != "8bit":
            kind = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
            kind["bnb_4bit_use_double_quant"] = quantization == "4bit-double"
        options["quantization_config"] = transformers.BitsAndBytesConfig(**kind, llm_int8_skip_modules=skip_modules)
    settings = json.loads((Path(checkpoint) / "config.json").read_text(encoding="utf-8"))
    (name,) = settings["architectures"]
    placement = {"": device} if device_map is None else device_map
    return (
        getattr(transformers, name)
        .from_pretrained(checkpoint, dtype=torch.bfloat16, device_map=placement, **options)
        .eval()
    )


def plain_linears(module: Any) -> list[str]:
    """The linears of a module that are not quantized, routers left out."""
    import torch

    return [
        name
        for name, child in module.named_modules()
        if type(child) is torch.nn.Linear and not name.endswith("router.proj")
    ]


def relative_inputs(model: Any) -> dict[str, Any]:
    """A prompt of 24 tokens, batch 1, with an image, and with a sound if the model hears; for a model that writes by
    diffusion a canvas.
    """
    from gemma4_compat._lab import tiny

    diffuses = hasattr(model.config, "canvas_length")
    batch = tiny.inputs("cpu", text_only=diffuses)
    batch.pop("mm_token_type_ids", None)
    if diffuses:
        batch["decoder_input_ids"] = batch["input_ids"].flip(1)[:, :CANVAS]
    device = next(iter(model.parameters())).device
    return {name: value.to("cpu" if device.type == "meta" else device) for name, value in batch.items()}


def outputs(model: Any) -> Outputs:
    """Three forwards, and a ``generate`` whose random numbers are the same each time; of a model that embeds, its
    embeddings and no tokens.
    """
    import torch

    batch = relative_inputs(model)
    diffuses = "decoder_input_ids" in batch
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        found = [model(**batch) for _ in range(FORWARDS)]
        values = tuple((one.logits if diffuses else one.last_hidden_state).float().cpu() for one in found)
        tokens = torch.zeros(0)
        if diffuses:
            torch.manual_seed(0)
            options = {"max_new_tokens": 2 * CANVAS, "max_denoising_steps": 3, "eos_token_id": 1}
            tokens = model.generate(batch["input_ids"], **options).sequences.cpu()
    return Outputs(values, tokens)


def _needs(name: str) -> Any:
    import transformers

    if not hasattr(transformers, name):
        raise MissingPartError(f"transformers {transformers.__version__} has no {name}")
    return transformers
