"""Tiny Gemma 4 models with random weights, in memory or saved as checkpoints; no model hub is needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gemma4_compat._gemma4.models import shared_weights, variants
from gemma4_compat._lab import tiny_configs

_ASSISTANT = ("AssistantConfig", "TextConfig")  # the classes of its configuration


def build_checkpoint(
    folder: Path,
    *,
    seed: int = 0,
    layers: int = 6,
    per_layer_vocabulary: int = tiny_configs.VOCABULARY,
    positions: int = 16,
    text_variant: str = "E2B",
    variant: str | None = None,
    full_width: int = tiny_configs.TEXT["global_head_dim"],
    width: int = tiny_configs.TEXT["hidden_size"],
) -> Path:
    """Write a checkpoint of :func:`tiny_configs.config`'s class (bf16, about 1 MB) into ``folder`` and return it."""
    import torch
    import transformers

    torch.manual_seed(seed)
    shape = tiny_configs.config(
        layers,
        per_layer_vocabulary=per_layer_vocabulary,
        positions=positions,
        text_variant=text_variant,
        variant=variant,
        full_width=full_width,
        width=width,
    )
    model = getattr(transformers, _class_of(variant == variants.UNIFIED))(shape)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.1)
            elif not name.endswith("per_dim_scale"):
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            # Bounds that clip, so that a fix that loses the wrapper's clamps fails.
            if name.endswith(("input_min", "output_min")):
                buffer.fill_(-1.25)
            elif name.endswith(("input_max", "output_max")):
                buffer.fill_(1.25)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def build_moe_checkpoint(folder: Path, *, seed: int = 0, layers: int = 3) -> Path:
    """Write a model of :func:`tiny_configs.moe_config` (bf16) into ``folder`` and return it."""
    import torch
    from transformers import Gemma4ForConditionalGeneration

    torch.manual_seed(seed)
    model = Gemma4ForConditionalGeneration(tiny_configs.moe_config(layers))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.1)
            elif "router" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def build_unified_checkpoint(folder: Path) -> Path:
    """Write a tiny 12B, a ``Gemma4UnifiedForConditionalGeneration``, into ``folder`` and return it."""
    return build_checkpoint(folder, variant=variants.UNIFIED)


def assistant_class(checkpoint: Path) -> str:
    """The class of an assistant model for the model in ``checkpoint``.

    Raises:
        ImportError: the installed transformers does not have it.
    """
    import transformers

    name = class_name(checkpoint).replace("ForConditionalGeneration", "AssistantForCausalLM")
    if not hasattr(transformers, name):
        raise ImportError(f"transformers {transformers.__version__} has no {name}")
    return name


def build_assistant(checkpoint: Path, folder: Path, *, variant: str | None = None, seed: int = 0) -> Path:
    """Write an assistant model for the model in ``checkpoint`` into ``folder`` and return it.

    It has one period of the model's layers; each uses the keys and values of the model's last layer of its kind. Its
    weights are random, so few of its candidate tokens are accepted.

    Raises:
        ImportError: the installed transformers does not have it.
    """
    import torch
    import transformers

    name = assistant_class(checkpoint)
    text = tiny_configs.text_shape() if variant is None else tiny_configs.scaled_text(variants.shape(variant), 1)
    period = text["layer_types"].index("full_attention") + 1
    text |= {"layer_types": text["layer_types"][:period], "num_hidden_layers": period, "num_kv_shared_layers": period}
    text |= {"enable_moe_block": False, "use_double_wide_mlp": False}
    if variant != variants.UNIFIED:
        text |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    classes = {kind: getattr(transformers, name.replace("AssistantForCausalLM", kind)) for kind in _ASSISTANT}
    torch.manual_seed(seed)
    shape = classes["AssistantConfig"](text_config=classes["TextConfig"](**text), backbone_hidden_size=64)
    model = randomized(getattr(transformers, name)(shape))
    model.generation_config.num_assistant_tokens = 3
    model.save_pretrained(folder)
    return folder


def build_text_checkpoint(folder: Path, *, seed: int = 0, text_variant: str = "E2B") -> Path:
    """Write a ``Gemma4ForCausalLM``, the language model of :func:`tiny_configs.config`, and return ``folder``."""
    import torch
    from transformers import Gemma4ForCausalLM

    torch.manual_seed(seed)
    randomized(Gemma4ForCausalLM(tiny_configs.config(text_variant=text_variant).text_config)).save_pretrained(folder)
    return folder


def without_per_layer_inputs(checkpoint: Path, *, seed: int = 0) -> Any:
    """A random ``Gemma4ForCausalLM``, float32, in eval mode: the language model of a checkpoint without its per-layer
    embeddings, but with its KV-shared layers. No released model is like that; assistants are.
    """
    import torch
    from transformers import AutoConfig, Gemma4ForCausalLM

    text = AutoConfig.from_pretrained(checkpoint).get_text_config()
    text.hidden_size_per_layer_input = 0
    torch.manual_seed(seed)
    return randomized(Gemma4ForCausalLM(text)).float().eval()


def build_text_copy(checkpoint: Path, folder: Path) -> Path:
    """Write the language model of a multimodal checkpoint, the same tensors, as a text-only checkpoint."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig

    inside = "model.language_model."
    weights = load_file(checkpoint / "model.safetensors")
    text = {f"model.{name[len(inside) :]}": value for name, value in weights.items() if name.startswith(inside)}
    config = AutoConfig.from_pretrained(checkpoint).get_text_config()
    config.architectures = [class_name(checkpoint, text_only=True)]
    config.save_pretrained(folder)
    save_file(text, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def build_released(checkpoint: Path, folder: Path, *, seed: int = 1) -> Path:
    """Write a copy of a checkpoint with random keys and values for its KV-shared layers, as in released checkpoints,
    and return ``folder``. A model without such layers is copied unchanged.
    """
    import shutil

    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig

    shutil.copytree(checkpoint, folder, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    before = shared_weights.prefix(weights)
    text = AutoConfig.from_pretrained(checkpoint).get_text_config()
    generator = torch.Generator().manual_seed(seed)
    for layer in shared_weights.shared(text.num_hidden_layers, text.num_kv_shared_layers):
        # A layer of the same kind has them, in the right shapes.
        like = text.layer_types.index(text.layer_types[layer])
        for name in ("k_proj", "v_proj", "k_norm"):
            shape = weights[f"{before}layers.{like}.self_attn.{name}.weight"].shape
            value = torch.randn(shape, generator=generator).to(torch.bfloat16)
            weights[f"{before}layers.{layer}.self_attn.{name}.weight"] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def unified_text_model(*, seed: int = 0) -> Any:
    """A random ``Gemma4UnifiedForCausalLM`` (the 12B's classes) of :data:`tiny_configs.TEXT`, bf16, in eval mode.

    Raises:
        ImportError: the installed transformers has no such model.
    """
    import torch
    from transformers import Gemma4UnifiedForCausalLM, Gemma4UnifiedTextConfig

    torch.manual_seed(seed)
    return randomized(Gemma4UnifiedForCausalLM(Gemma4UnifiedTextConfig(**tiny_configs.text_shape()))).eval()


def unified_model(*, seed: int = 0) -> Any:
    """The 12B's ``Gemma4UnifiedForConditionalGeneration``, float32, without vision and audio: no KV-shared layers, and
    bidirectional attention among the tokens of an image.

    Raises:
        ImportError: the installed transformers has no such model.
    """
    import torch
    from transformers import Gemma4UnifiedConfig, Gemma4UnifiedForConditionalGeneration, Gemma4UnifiedTextConfig

    torch.manual_seed(seed)
    shape = {**tiny_configs.text_shape(), "num_kv_shared_layers": 0, "use_bidirectional_attention": "vision"}
    config = Gemma4UnifiedConfig(text_config=Gemma4UnifiedTextConfig(**shape), vision_config=None, audio_config=None)
    return randomized(Gemma4UnifiedForConditionalGeneration(config)).float().eval()


def randomized(model: Any) -> Any:
    """``model`` in bf16 with random matrices."""
    import torch

    model.to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.1)
    return model


def _class_of(unified: bool, *, text_only: bool = False) -> str:
    kind = "ForCausalLM" if text_only else "ForConditionalGeneration"
    return f"Gemma4{'Unified' if unified else ''}{kind}"


def class_name(checkpoint: Path, *, text_only: bool = False) -> str:
    """The class that loads a checkpoint of any variant, or only its language model."""
    kind = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))["model_type"]
    return _class_of(kind.startswith("gemma4_unified"), text_only=text_only)


def empty_model(checkpoint: Path, dtype: Any) -> Any:
    """The model of the checkpoint without weights, for ``load_checkpoint_and_dispatch`` to fill.

    Raises:
        LookupError: the checkpoint has other names for some weights. transformers converts names while it loads (those
            of the 12B's embedders); accelerate does not, so it cannot load this checkpoint.
    """
    import transformers
    from accelerate import init_empty_weights
    from safetensors import safe_open

    with init_empty_weights():
        model = getattr(transformers, class_name(checkpoint))._from_config(
            transformers.AutoConfig.from_pretrained(checkpoint), dtype=dtype
        )
    model.tie_weights()
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        unknown = sorted({*file.keys()} - model.state_dict(keep_vars=True).keys())
    if unknown:
        raise LookupError(f"accelerate does not convert names of weights, such as {unknown[0]}")
    return model
