"""A tiny Gemma 4, loaded, quantized and dispatched as users do it, and inputs for it.

Upstream is imported only inside functions, so this module may be imported first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gemma4_compat._engine import versions
from gemma4_compat._gemma4.models import variants
from gemma4_compat._lab import tiny_configs, tiny_models


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
    """Load the checkpoint through ``from_pretrained``, in eval mode.

    Args:
        checkpoint: folder written by :func:`tiny_models.build_checkpoint`.
        quantization: None (bf16), ``"4bit"`` (nf4), ``"4bit-double"`` (nested) or ``"8bit"``.
        device: for the whole model.
        device_map: a map for ``from_pretrained`` instead of ``device``.
        skip_modules: further modules that stay unquantized.
        towers: quantize the vision and audio towers on every release; see :func:`quantization_config`.
        cls: the class to load; the multimodal one if None.
        dtype: of unquantized weights and of 4-bit computation; bf16 if None.
        kwargs: for ``from_pretrained``.
    """
    import torch
    import transformers

    name = cls or tiny_models.class_name(checkpoint)
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

    ``cpu_offload`` must be set for a map with both CPU and other entries; transformers then leaves CPU entries
    unquantized. Unless ``towers``, the towers stay in bf16 before transformers 5.13, where quantized towers give wrong
    features (F9) or raise (F10); the multimodal embedders of a ``unified`` model stay in bf16 on every release.

    Raises:
        ValueError: the name is unknown.
    """
    if quantization is None:
        return None
    import torch
    from transformers import BitsAndBytesConfig

    skip = ["lm_head", *(skip_modules or []), *([] if towers else plain_towers(unified))]
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


def plain_towers(unified: bool = False) -> list[str]:
    """Modules that :func:`quantization_config` leaves in bf16 unless ``towers`` is set."""
    import transformers

    if unified:
        return ["model.embed_vision", "model.embed_audio"]
    older = versions.admits("<5.13", transformers.__version__)
    return ["model.vision_tower", "model.audio_tower"] if older else []


def device_map(model: Any, offload: str, *, main: Any, offloaded: Any) -> dict[str, Any]:
    """A map over decoder layers, towers and everything else, for ``dispatch_model`` or ``from_pretrained``.

    Args:
        model: a ``Gemma4ForConditionalGeneration``, or the 12B's.
        offload: what goes to ``offloaded``: ``"towers"`` (the 12B's multimodal embedders), ``"layers"`` (two plain
            decoder layers and the last one, which is KV-shared if any is), ``"both"`` or ``"none"``.
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
    """The names of the towers of ``model.model``, or of the multimodal embedders of a unified model."""
    children = dict(model.model.named_children())
    found = [name for name in ("vision_tower", "audio_tower") if children.get(name) is not None]
    return found or [name for name in ("embed_vision", "embed_audio") if children.get(name) is not None]


def skip_keys(model: Any) -> list[str]:
    """The arguments that accelerate's hooks must not move, as the model itself lists them.

    In transformers 5.5.2 the list lacks ``shared_kv_states``. From 5.23 on it no longer has that key: there they are
    moved.
    """
    own = list(model._skip_keys_device_placement)
    return [*own, "shared_kv_states"] if versions.admits("<5.5.3", versions.current("transformers") or "") else own


def dispatch(model: Any, placement: dict[str, Any], folder: Path) -> Any:
    """``accelerate.dispatch_model`` as transformers calls it (with the model's own skip keys)."""
    from accelerate import dispatch_model

    return dispatch_model(model, placement, offload_dir=str(folder), skip_keys=skip_keys(model))


def dispatch_to_two(model: Any, second: str, there: list[str] | None = None) -> Any:
    """Dispatch a model on the CPU so that parts go to a second device; nothing is offloaded.

    ``there``: names of modules as in :func:`device_map`; some of the decoder layers if None.
    """
    import torch
    from accelerate import dispatch_model

    main, other = torch.device("cpu"), torch.device(second)
    placement = device_map(model, "layers" if there is None else "none", main=main, offloaded=other)
    placement |= dict.fromkeys(there or [], other)
    # accelerate would take any of them as the main device
    return dispatch_model(model, placement, main_device=main, skip_keys=skip_keys(model))


def dequantize(model: Any) -> Any:
    """Replace each quantized linear of ``model`` by an ``nn.Linear`` with its dequantized weight; return the model."""
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


def inputs(device: Any = "cpu", *, text_only: bool = False, variant: str | None = None) -> dict[str, Any]:
    """A prompt of 24 tokens, batch 1; with one image and one audio clip (4 soft tokens each) unless text only.

    A ``variant`` without audio inputs gets no audio clip.
    """
    import torch

    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, 240, (1, 24), generator=generator)
    batch: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if not text_only:
        unified = variant == variants.UNIFIED
        ids[0, 4:8] = tiny_configs.IMAGE_TOKEN
        edge, pixels = (2, 24) if unified else (6, 8)  # patches per edge of the image, pixels per edge of a patch
        side = torch.arange(edge)
        positions = torch.stack(torch.meshgrid(side, side, indexing="xy"), dim=-1).reshape(1, edge * edge, 2)
        batch["pixel_values"] = torch.rand(1, edge * edge, 3 * pixels * pixels, generator=generator)
        batch["image_position_ids"] = positions
        if variant is None or variants.shape(variant)["audio"] is not None:
            ids[0, 12:16] = tiny_configs.AUDIO_TOKEN
            frames = 4 if unified else 16
            batch["input_features"] = torch.randn(1, frames, 128, generator=generator)
            batch["input_features_mask"] = torch.ones(1, frames, dtype=torch.bool)
        image, audio = ids == tiny_configs.IMAGE_TOKEN, ids == tiny_configs.AUDIO_TOKEN
        batch["mm_token_type_ids"] = image.long() + 3 * audio.long()
    return {name: value.to(device) for name, value in batch.items()}


def without(batch: dict[str, Any], prefix: str) -> dict[str, Any]:
    """``batch`` of :func:`inputs` with text tokens in place of the ``"image"`` or the audio (``"input_features"``)."""
    token = tiny_configs.IMAGE_TOKEN if prefix == "image" else tiny_configs.AUDIO_TOKEN
    prefixes = (prefix, "pixel_values") if prefix == "image" else (prefix,)
    kept = {name: value for name, value in batch.items() if not name.startswith(prefixes)}
    media = kept["input_ids"] == token
    kept["input_ids"] = kept["input_ids"].masked_fill(media, 5)
    kept["mm_token_type_ids"] = kept["mm_token_type_ids"].masked_fill(media, 0)
    return kept


def several_media(batch: dict[str, Any]) -> dict[str, Any]:
    """Two prompts: the first has two images and two sounds, the second one of each.

    ``batch``: from :func:`inputs`; without sounds if it has none.
    """
    import torch

    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(3, 240, (2, 40), generator=generator)
    ids[0, 4:8] = ids[0, 10:14] = ids[1, 6:10] = tiny_configs.IMAGE_TOKEN
    if "input_features" in batch:
        ids[0, 20:24] = ids[0, 26:30] = ids[1, 20:24] = tiny_configs.AUDIO_TOKEN
    found: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for name in ("pixel_values", "input_features"):
        if name in batch:
            found[name] = torch.randn(3, *batch[name].shape[1:], generator=generator)
    for name in ("image_position_ids", "input_features_mask"):
        if name in batch:
            found[name] = torch.cat([batch[name].cpu()] * 3)
    image, audio = ids == tiny_configs.IMAGE_TOKEN, ids == tiny_configs.AUDIO_TOKEN
    found["mm_token_type_ids"] = image.long() + 3 * audio.long()
    return {name: value.to(batch["input_ids"].device) for name, value in found.items()}


def unified_inputs(device: Any = "cpu", *, text_only: bool = False) -> dict[str, Any]:
    """:func:`inputs` for the checkpoint of :func:`tiny_models.build_unified_checkpoint`."""
    return inputs(device, text_only=text_only, variant=variants.UNIFIED)
