"""A tiny random Gemma 4 and tiny adapters, with the real classes, saved and loaded the real way.

No model hub is needed. The shape keeps what breaks: clipped linears in vision and audio towers, layers that share
their keys and values, per-layer embeddings, tied head, sliding and full attention. Linear widths suit bitsandbytes on
the CPU (inputs a multiple of 64, outputs a multiple of 32).

Everything here imports upstream inside its functions: the module itself may be imported before them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from gemma4_compat._engine import versions
from gemma4_compat._models import variants

IMAGE_TOKEN, AUDIO_TOKEN, VIDEO_TOKEN, VOCABULARY = 250, 251, 252, 256

#: Adapter targets by what they cover. The towers' names reach clipped linears, whose wrapper PEFT does not know.
TARGETS: dict[str, str] = {
    "language": r".*language_model\..*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)",
    "towers": r".*(vision_tower|audio_tower)\..*\.(q_proj|k_proj|v_proj|gate_proj|down_proj|ffw_layer_1)",
    "all": r".*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj|ffw_layer_1)",
}
#: The same for the 12B, which has embedders where the others have towers.
_UNIFIED_TARGETS = {
    **TARGETS,
    "towers": r".*\.(patch_dense|embedding_projection)",
    "all": r".*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj|patch_dense|embedding_projection)",
}

#: Text model: layers of width 64, the last 2 of them KV-shared.
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_kv_shared_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 8,
    "max_position_embeddings": 256,
    "final_logit_softcapping": 30.0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
_LAYER_TYPES = ["sliding_attention", "sliding_attention", "full_attention"]
#: What a text model has of a released variant: none of the larger ones has KV-shared layers or per-layer embeddings.
_LARGE: dict[str, Any] = {
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "use_bidirectional_attention": "vision",
}
TEXT_VARIANTS: dict[str, dict[str, Any]] = {
    "E2B": {},
    "31B": _LARGE,
    "26B-A4B": {**_LARGE, "enable_moe_block": True, "num_experts": 4, "moe_intermediate_size": 64, "top_k_experts": 2},
}
_VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "patch_size": 8,
    "position_embedding_size": 16,
    "pooling_kernel_size": 3,
}
_AUDIO: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [128, 2],
    "output_proj_dims": 64,
    "use_clipped_linears": True,
}
_UNIFIED_VISION: dict[str, Any] = {
    "patch_size": 8,
    "pooling_kernel_size": 3,
    "mm_embed_dim": 64,
    "mm_posemb_size": 16,
    "output_proj_dims": 64,
}
_UNIFIED_SAMPLES = 128  # of a sound, in each of its tokens
_ASSISTANT = ("AssistantConfig", "TextConfig")  # the classes of its configuration
_TOKENS: dict[str, Any] = {
    "image_token_id": IMAGE_TOKEN,
    "audio_token_id": AUDIO_TOKEN,
    "video_token_id": VIDEO_TOKEN,
    "boi_token_id": 253,
    "eoi_token_id": 254,
    "boa_token_id": 255,
    "eoa_token_index": 249,
    "tie_word_embeddings": True,
}


def text_shape(layers: int = 6) -> dict[str, Any]:
    """:data:`TEXT` with that many layers, a multiple of 3."""
    return {**TEXT, "num_hidden_layers": layers, "layer_types": _LAYER_TYPES * (layers // 3)}


def config(
    layers: int = 6,
    *,
    table: int = VOCABULARY,
    positions: int = 16,
    text_variant: str = "E2B",
    variant: str | None = None,
) -> Any:
    """A ``Gemma4Config``: 2 vision and 2 audio layers, and the text model of :func:`text_shape`.

    ``table`` is the number of rows of the per-layer embedding, ``positions`` the patches an image may have a side;
    ``text_variant`` is a key of :data:`TEXT_VARIANTS`. Of a ``variant`` (:data:`variants.NAMES`) it is the variant's
    own configuration made small, see :func:`_scaled_text`.

    Raises:
        Gemma4CompatError: the installed transformers has no such variant.
    """
    from transformers.models.gemma4 import configuration_gemma4 as gemma4

    if variant is not None:
        return _scaled(variant, layers, table)
    inputs = {"vocab_size_per_layer_input": table, "hidden_size_per_layer_input": 64}
    return gemma4.Gemma4Config(
        text_config=gemma4.Gemma4TextConfig(**{**text_shape(layers), **inputs, **TEXT_VARIANTS[text_variant]}),
        vision_config=gemma4.Gemma4VisionConfig(
            **{**_VISION, "position_embedding_size": positions}, use_clipped_linears=True
        ),
        audio_config=gemma4.Gemma4AudioConfig(**_AUDIO),
        **_TOKENS,
    )


def _scaled(variant: str, layers: int, table: int) -> Any:
    shape = variants.shape(variant)
    text = _scaled_text(shape, layers, table)
    if variant == variants.UNIFIED:
        classes = variants.unified_classes()
        return classes.Gemma4UnifiedConfig(
            text_config=classes.Gemma4UnifiedTextConfig(**text),
            vision_config=classes.Gemma4UnifiedVisionConfig(**_UNIFIED_VISION),
            audio_config=classes.Gemma4UnifiedAudioConfig(audio_embed_dim=_UNIFIED_SAMPLES),
            **_TOKENS,
        )
    from transformers.models.gemma4 import configuration_gemma4 as gemma4

    if shape["text"].get("hidden_size_per_layer_input") != 0:
        text |= {"hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": table}
    return gemma4.Gemma4Config(
        text_config=gemma4.Gemma4TextConfig(**text),
        vision_config=gemma4.Gemma4VisionConfig(**{**shape["vision"], **_VISION}),
        audio_config=None if shape["audio"] is None else gemma4.Gemma4AudioConfig(**_AUDIO),
        **_TOKENS,
    )


def _scaled_text(shape: dict[str, Any], layers: int, table: int) -> dict[str, Any]:
    """What a variant's text model is made of, and small numbers of it.

    Every switch stays as it is, and so does the pattern of layers: one round of it, two (the second with shared keys
    and values) where layers share, more for that many ``layers``. Heads keep their order: full attention has fewer
    keys and values than sliding attention, and that has fewer than queries, where it is so in the variant.
    """
    real = shape["text"]
    period = shape["layer_types"].index("full_attention") + 1
    shares = "num_kv_shared_layers" in real
    rounds = max(2 if shares else 1, -(-layers // period))
    text = {
        **real,
        **TEXT,
        "num_kv_shared_layers": period if shares else 0,
        "num_attention_heads": 2 * min(real["num_key_value_heads"], 2),
        "num_key_value_heads": min(real["num_key_value_heads"], 2),
        "num_hidden_layers": rounds * period,
        "layer_types": shape["layer_types"][:period] * rounds,
    }
    small = {"num_global_key_value_heads": 1, "num_experts": 32, "top_k_experts": 2, "moe_intermediate_size": 64}
    return text | {name: value for name, value in small.items() if name in real}


def build_checkpoint(
    folder: Path,
    *,
    seed: int = 0,
    layers: int = 6,
    table: int = VOCABULARY,
    positions: int = 16,
    text_variant: str = "E2B",
    variant: str | None = None,
) -> Path:
    """Write a checkpoint of :func:`config`'s class (bf16, about 1 MB) into ``folder`` and return it."""
    import torch
    import transformers

    torch.manual_seed(seed)
    shape = config(layers, table=table, positions=positions, text_variant=text_variant, variant=variant)
    model = getattr(transformers, _class_of(variant == variants.UNIFIED))(shape)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.1)
            elif not name.endswith("per_dim_scale"):
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            # Bounds that cut: a repair that loses the wrapper's clamps must not pass.
            if name.endswith(("input_min", "output_min")):
                buffer.fill_(-1.25)
            elif name.endswith(("input_max", "output_max")):
                buffer.fill_(1.25)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def moe_config(layers: int = 3) -> Any:
    """A ``Gemma4Config`` like the 26B-A4B's: 32 experts of which a token has 2, values that are keys, no per-layer
    inputs, no shared keys and values, no sound; ``layers`` is a multiple of 3.
    """
    from transformers.models.gemma4 import configuration_gemma4 as gemma4

    shape = text_shape(layers) | {
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 32,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
    }
    other = config()
    return gemma4.Gemma4Config(
        text_config=gemma4.Gemma4TextConfig(**shape),
        vision_config=other.vision_config,
        audio_config=None,
        **{
            name: getattr(other, name) for name in ("image_token_id", "video_token_id", "boi_token_id", "eoi_token_id")
        },
        tie_word_embeddings=True,
    )


def build_moe_checkpoint(folder: Path, *, seed: int = 0, layers: int = 3) -> Path:
    """Write a ``Gemma4ForConditionalGeneration`` of :func:`moe_config` (bf16) into ``folder`` and return it."""
    import torch
    from transformers import Gemma4ForConditionalGeneration

    torch.manual_seed(seed)
    model = Gemma4ForConditionalGeneration(moe_config(layers))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.1)
            elif "router" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def build_unified_checkpoint(folder: Path) -> Path:
    """Write the 12B's checkpoint made small, a ``Gemma4UnifiedForConditionalGeneration``, and return ``folder``."""
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
    """Write an assistant model for the model in ``checkpoint`` into ``folder`` and return it: one round of the model's
    layers, each with the keys and values of the model's last one of its kind. Random, so few of its guesses are taken.

    Raises:
        ImportError: the installed transformers has none.
    """
    import torch
    import transformers

    name = assistant_class(checkpoint)
    text = text_shape() if variant is None else _scaled_text(variants.shape(variant), 1, VOCABULARY)
    period = text["layer_types"].index("full_attention") + 1
    text |= {"layer_types": text["layer_types"][:period], "num_hidden_layers": period, "num_kv_shared_layers": period}
    text |= {"enable_moe_block": False, "use_double_wide_mlp": False}
    if variant != variants.UNIFIED:
        text |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    classes = {kind: getattr(transformers, name.replace("AssistantForCausalLM", kind)) for kind in _ASSISTANT}
    torch.manual_seed(seed)
    shape = classes["AssistantConfig"](text_config=classes["TextConfig"](**text), backbone_hidden_size=64)
    model = _randomized(getattr(transformers, name)(shape))
    model.generation_config.num_assistant_tokens = 3
    model.save_pretrained(folder)
    return folder


def _class_of(unified: bool, *, text_only: bool = False) -> str:
    kind = "ForCausalLM" if text_only else "ForConditionalGeneration"
    return f"Gemma4{'Unified' if unified else ''}{kind}"


def class_name(checkpoint: Path, *, text_only: bool = False) -> str:
    """The class for a checkpoint of one of the variants, or for its language model alone."""
    kind = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))["model_type"]
    return _class_of(kind.startswith("gemma4_unified"), text_only=text_only)


def build_text_checkpoint(folder: Path, *, seed: int = 0, text_variant: str = "E2B") -> Path:
    """Write a checkpoint of :func:`config`'s language model alone, a ``Gemma4ForCausalLM``, and return ``folder``."""
    import torch
    from transformers import Gemma4ForCausalLM

    torch.manual_seed(seed)
    _randomized(Gemma4ForCausalLM(config(text_variant=text_variant).text_config)).save_pretrained(folder)
    return folder


def build_text_twin(checkpoint: Path, folder: Path) -> Path:
    """Write a multimodal checkpoint's language model, the same tensors, as a text-only checkpoint into ``folder``."""
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


def unified_text_model(*, seed: int = 0) -> Any:
    """A ``Gemma4UnifiedForCausalLM`` (the 12B's classes) of the shape of :data:`TEXT`, random, bf16, in eval mode.

    Raises:
        ImportError: the installed transformers has no such model.
    """
    import torch
    from transformers import Gemma4UnifiedForCausalLM, Gemma4UnifiedTextConfig

    torch.manual_seed(seed)
    return _randomized(Gemma4UnifiedForCausalLM(Gemma4UnifiedTextConfig(**text_shape()))).eval()


def unified_model(*, seed: int = 0) -> Any:
    """The 12B's ``Gemma4UnifiedForConditionalGeneration``, float32, without vision and audio: no KV-shared layers, and
    tokens of one image, whatever they are, see each other.

    Raises:
        ImportError: the installed transformers has no such model.
    """
    import torch
    from transformers import Gemma4UnifiedConfig, Gemma4UnifiedForConditionalGeneration, Gemma4UnifiedTextConfig

    torch.manual_seed(seed)
    shape = {**text_shape(), "num_kv_shared_layers": 0, "use_bidirectional_attention": "vision"}
    config = Gemma4UnifiedConfig(text_config=Gemma4UnifiedTextConfig(**shape), vision_config=None, audio_config=None)
    return _randomized(Gemma4UnifiedForConditionalGeneration(config)).float().eval()


def _randomized(model: Any) -> Any:
    """``model`` in bf16 with random matrices."""
    import torch

    model.to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.1)
    return model


def load(
    checkpoint: Path,
    quantization: str | None = None,
    *,
    device: Any = "cpu",
    device_map: Any = None,
    skip_modules: list[str] | None = None,
    towers: bool = False,
    cls: str | None = None,
    dtype: Any = None,
    **kwargs: Any,
) -> Any:
    """The checkpoint through ``from_pretrained``, in eval mode.

    Args:
        checkpoint: folder written by :func:`build_checkpoint`.
        quantization: None (bf16), ``"4bit"`` (nf4), ``"4bit-double"`` (nested) or ``"8bit"``.
        device: where everything goes.
        device_map: a map for ``from_pretrained`` instead of ``device``.
        skip_modules: more modules that stay unquantized.
        towers: quantize the vision and the audio tower on every release, see :func:`quantization_config`.
        cls: the class that loads it; the multimodal one if None.
        dtype: of what is not quantized, and of 4-bit computation; bf16 without.
        kwargs: for ``from_pretrained``.
    """
    import torch
    import transformers

    name = cls or class_name(checkpoint)
    placement = {"": device} if device_map is None else device_map
    split = isinstance(placement, str) or len(set(placement.values())) > 1
    return (
        getattr(transformers, name)
        .from_pretrained(
            checkpoint,
            dtype=dtype or torch.bfloat16,
            device_map=placement,
            quantization_config=quantization_config(
                quantization,
                cpu_offload=split,
                skip_modules=skip_modules,
                towers=towers,
                dtype=dtype,
                unified=name.startswith("Gemma4Unified"),
            ),
            **kwargs,
        )
        .eval()
    )


def quantization_config(
    quantization: str | None,
    *,
    cpu_offload: bool = False,
    skip_modules: list[str] | None = None,
    towers: bool = False,
    dtype: Any = None,
    unified: bool = False,
) -> Any:
    """The ``BitsAndBytesConfig`` for a name that :func:`load` knows.

    ``cpu_offload`` must be set for a map with CPU entries beside others; transformers then leaves those unquantized.
    The towers stay in bf16 before transformers 5.13, where quantized ones are blind (F9) or raise (F10), unless
    ``towers``; a ``unified`` model's embedders, which are in their place, on every release.

    Raises:
        ValueError: another name.
    """
    if quantization is None:
        return None
    import torch
    import transformers
    from transformers import BitsAndBytesConfig

    skip = ["lm_head", *(skip_modules or [])]
    if not towers and unified:
        skip += ["model.embed_vision", "model.embed_audio"]
    elif not towers and versions.admits("<5.13", transformers.__version__):
        skip += ["model.vision_tower", "model.audio_tower"]
    if quantization == "8bit":
        return BitsAndBytesConfig(
            load_in_8bit=True, llm_int8_enable_fp32_cpu_offload=cpu_offload, llm_int8_skip_modules=skip
        )
    if quantization not in ("4bit", "4bit-double"):
        raise ValueError(f"quantization {quantization!r} is unknown; use None, '4bit', '4bit-double' or '8bit'")
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=quantization == "4bit-double",
        bnb_4bit_compute_dtype=dtype or torch.bfloat16,
        llm_int8_enable_fp32_cpu_offload=cpu_offload,
        llm_int8_skip_modules=skip,
    )


def device_map(model: Any, offload: str, *, main: Any, offloaded: Any) -> dict[str, Any]:
    """A map over decoder layers, towers and everything else, for ``dispatch_model`` or ``from_pretrained``.

    Args:
        model: a ``Gemma4ForConditionalGeneration``, or the 12B's.
        offload: what goes to ``offloaded``: ``"towers"`` (the 12B's embedders), ``"layers"`` (two plain decoder layers
            and the last one, which shares keys and values where any does), ``"both"`` or ``"none"``.
        main: device of the rest.
        offloaded: ``"cpu"`` or ``"disk"``.
    """
    chosen: set[str] = set()
    if offload in ("towers", "both"):
        chosen |= {f"model.{name}" for name in towers(model)}
    if offload in ("layers", "both"):
        last = len(model.model.language_model.layers) - 1
        chosen |= {f"model.language_model.layers.{index}" for index in (0, 2, last)}
    names: list[str] = []
    for name, child in model.model.named_children():
        if name == "language_model":
            for part, module in child.named_children():
                prefix = f"model.language_model.{part}"
                names += [f"{prefix}.{index}" for index in range(len(module))] if part == "layers" else [prefix]
        else:
            names.append(f"model.{name}")
    names.append("lm_head")
    return {name: offloaded if name in chosen else main for name in names}


def towers(model: Any) -> list[str]:
    """The names of the towers that ``model.model`` has; of a unified model those of its embedders."""
    children = dict(model.model.named_children())
    found = [name for name in ("vision_tower", "audio_tower") if children.get(name) is not None]
    return found or [name for name in ("embed_vision", "embed_audio") if children.get(name) is not None]


def dispatch(model: Any, placement: dict[str, Any], folder: Path) -> Any:
    """``accelerate.dispatch_model`` as transformers calls it (with the model's own skip keys)."""
    from accelerate import dispatch_model

    skip = list(model._skip_keys_device_placement)
    if "shared_kv_states" not in skip:  # missing from the model's own list in 5.5.2; harmless elsewhere
        skip.append("shared_kv_states")
    return dispatch_model(model, placement, offload_dir=str(folder), skip_keys=skip)


def inputs(device: Any = "cpu", *, text_only: bool = False, variant: str | None = None) -> dict[str, Any]:
    """A prompt of 24 tokens, batch 1; with one image (4 soft tokens) and one sound (4 soft tokens) unless text
    only. For a ``variant`` without an audio tower, without the sound.
    """
    import torch

    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, 240, (1, 24), generator=generator)
    batch: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if not text_only:
        unified = variant == variants.UNIFIED
        ids[0, 4:8] = IMAGE_TOKEN
        edge, pixels = (2, 24) if unified else (6, 8)  # patches along an edge of the image, pixels along one of theirs
        side = torch.arange(edge)
        positions = torch.stack(torch.meshgrid(side, side, indexing="xy"), dim=-1).reshape(1, edge * edge, 2)
        batch["pixel_values"] = torch.rand(1, edge * edge, 3 * pixels * pixels, generator=generator)
        batch["image_position_ids"] = positions
        if variant is None or variants.shape(variant)["audio"] is not None:
            ids[0, 12:16] = AUDIO_TOKEN
            frames = 4 if unified else 16
            batch["input_features"] = torch.randn(1, frames, 128, generator=generator)
            batch["input_features_mask"] = torch.ones(1, frames, dtype=torch.bool)
        batch["mm_token_type_ids"] = (ids == IMAGE_TOKEN).long() + 3 * (ids == AUDIO_TOKEN).long()
    return {name: value.to(device) for name, value in batch.items()}


def without(batch: dict[str, Any], prefix: str) -> dict[str, Any]:
    """``batch`` of :func:`inputs` with words where its media of that prefix (``"image"``, ``"input_features"``)
    were.
    """
    token = IMAGE_TOKEN if prefix == "image" else AUDIO_TOKEN
    prefixes = (prefix, "pixel_values") if prefix == "image" else (prefix,)
    kept = {name: value for name, value in batch.items() if not name.startswith(prefixes)}
    words = kept["input_ids"] == token
    kept["input_ids"] = kept["input_ids"].masked_fill(words, 5)
    kept["mm_token_type_ids"] = kept["mm_token_type_ids"].masked_fill(words, 0)
    return kept


def unified_inputs(device: Any = "cpu", *, text_only: bool = False) -> dict[str, Any]:
    """:func:`inputs` for the checkpoint of :func:`build_unified_checkpoint`."""
    return inputs(device, text_only=text_only, variant=variants.UNIFIED)


def dequantize(model: Any) -> Any:
    """Exchange each quantized linear of ``model`` for an ``nn.Linear`` with the bf16 weight it stands for; returns
    ``model``.
    """
    import torch
    from bitsandbytes import functional

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            weight: Any = getattr(child, "weight", None)
            if type(weight).__name__ == "Params4bit":
                values = functional.dequantize_4bit(weight.data, weight.quant_state)
            elif type(weight).__name__ == "Int8Params":
                values = weight.data.float() * weight.SCB.view(-1, 1) / 127
            else:
                continue
            plain = torch.nn.Linear(child.in_features, child.out_features, bias=child.bias is not None)
            plain.weight = torch.nn.Parameter(values.to(torch.bfloat16), requires_grad=False)
            plain.bias = child.bias
            setattr(parent, name, plain)
    return model


def build_adapter(checkpoint: Path, folder: Path, targets: str = "language", *, rank: int = 4, seed: int = 1) -> Path:
    """Write a LoRA adapter with non-zero weights for ``TARGETS[targets]`` into ``folder`` and return it.

    Wrapper targets are written the way adapters in the wild have them, on the inner ``.linear``; so it needs no patch.
    """
    model = load(checkpoint)
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
