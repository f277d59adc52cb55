"""The models that graph_decoding.py measures: shapes, checkpoints, placements and prompts."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import gemma4_compat
from benchmarks.small_card import device as small_card_device
from benchmarks.small_card import measure as small_card_measure
from benchmarks.small_card import models as small_card_models
from benchmarks.small_card.cases import PER_LAYER_EMBEDDINGS
from benchmarks.small_card.device import GIB, main_device
from gemma4_compat._gemma4.models import variants
from gemma4_compat._lab import tiny, tiny_adapters, tiny_models

#: By name: the variant, how many of its layers (None: all), GiB of the checkpoint.
SHAPES: dict[str, tuple[str, int | None, int]] = {
    "E2B": ("E2B", None, 11),
    "E4B": ("E4B", None, 17),
    "12B": ("12B", None, 25),
    "12B-6": ("12B", 6, 6),
    "31B": ("31B", None, 63),
    "31B-6": ("31B", 6, 11),
    "26B-A4B": ("26B-A4B", None, 52),
    "26B-A4B-6": ("26B-A4B", 6, 13),
    "tiny": ("tiny", None, 0),
    "tiny-12B": ("tiny", None, 0),
    "tiny-E2B": ("tiny", None, 0),
    "tiny-26B-A4B": ("tiny", None, 0),
}
WHERE = {
    "gpu": "everything on the GPU",
    "host": "table and towers on the host",
    "half": "table, towers and every second layer streamed",
    "sixth": "table, towers and every sixth layer streamed",
    "streamed": "table, towers and all layers streamed",
    "auto-2": 'device_map="auto", 2 GiB',
    "auto-4": 'device_map="auto", 4 GiB',
    "auto-6": 'device_map="auto", 6 GiB',
    "bf16": "bf16, everything on the GPU",
}
SPLIT = ("host", "half", "sixth", "streamed")
STREAMED = {"half": slice(None, None, 2), "sixth": slice(5, -1, 6), "streamed": slice(None)}
ADAPTED = "+lora"
SECOND = "second"  # the name of the adapter that is switched to


def build(shape: str, folder: Path, weights: dict[str, Any] | None = None) -> dict[str, Any]:
    """The checkpoint and two adapters for the language model; what the machine is; how fast it copies.

    ``weights`` is filled, for :func:`load`, with what is not written then: of a checkpoint, that takes longest.
    """
    import torch
    import transformers

    started = time.perf_counter()
    checkpoint = folder / "checkpoint"
    variant, layers, _ = SHAPES[shape]
    if variant == "tiny":
        scaled = {"variant": shape.removeprefix("tiny-")} if shape != "tiny" else {}
        model = tiny.load(tiny_models.build_checkpoint(checkpoint, **scaled))
    else:
        config = variants.config(variant, layers=layers)
        kind = "Gemma4Unified" if variant == variants.UNIFIED else "Gemma4"
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(main_device()):
            model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
        torch.set_default_dtype(torch.float32)
        if weights is None:
            model.save_pretrained(checkpoint, max_shard_size="4GB")
    if weights is not None:
        model.config.save_pretrained(checkpoint)
        weights.update(model.state_dict())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    rank = 4 if variant == "tiny" else 16
    small_card_models.write_adapter(model, folder / "adapter", tiny_adapters.TARGETS["language"], rank=rank)
    _write_second_adapter(folder)
    return {
        "parameters": parameters,
        "build_s": time.perf_counter() - started,
        "machine": small_card_device.machine(),
        "host_to_device_gib_s": small_card_device.bandwidth(),
    }


def _write_second_adapter(folder: Path) -> None:
    """The same adapter with the sign of what it adds turned round."""
    from safetensors.torch import load_file, save_file

    second = folder / f"adapter-{SECOND}"
    shutil.copytree(folder / "adapter", second, dirs_exist_ok=True)
    weights = load_file(second / "adapter_model.safetensors")
    turned = {name: -weight if "lora_B" in name else weight for name, weight in weights.items()}
    save_file(turned, second / "adapter_model.safetensors", metadata={"format": "pt"})


def work_folder(shape: str, *, times: float = 1.15) -> Path:
    """In memory where it fits: ``times`` the checkpoint's size; see :func:`small_card_models.work_folder`."""
    memory = Path("/dev/shm")
    needed = times * SHAPES[shape][2] * GIB
    return memory if memory.is_dir() and shutil.disk_usage(memory).free > needed else Path(tempfile.gettempdir())


def config_of(folder: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder / "checkpoint")


def device_map(where: str, folder: Path) -> dict[str, Any]:
    """Every block of the model by name and its place."""
    import torch
    import transformers

    checkpoint = folder / "checkpoint"
    with torch.device("meta"):
        model = getattr(transformers, tiny_models.class_name(checkpoint))(config_of(folder))
    away = "disk" if main_device() == "cpu" else "cpu"
    placement = tiny.device_map(model, "none" if where == "gpu" else "towers", main=main_device(), offloaded=away)
    if where != "gpu" and PER_LAYER_EMBEDDINGS in placement:
        placement[PER_LAYER_EMBEDDINGS] = away
    if where in STREAMED:
        layers = [name for name in placement if ".layers." in name]
        placement |= dict.fromkeys(layers[STREAMED[where]], away)
    return placement


def skipped(folder: Path) -> list[str]:
    """What is not quantized: head, towers and what follows them."""
    towers = ["model.vision_tower", "model.audio_tower"] if config_of(folder).model_type == "gemma4" else []
    return ["lm_head", *towers, "model.embed_vision", "model.embed_audio"]


def load(
    where: str, folder: Path, weights: dict[str, Any] | None = None, placement: dict[str, Any] | None = None
) -> Any:
    """The base model, placed as :data:`WHERE` or a map says: 4-bit with double quantization, experts too, or bf16.

    Of the checkpoint in ``folder``, or of ``weights`` in memory.
    """
    import torch
    import transformers
    from transformers import BitsAndBytesConfig

    checkpoint, on_cpu = folder / "checkpoint", main_device() == "cpu"
    options: dict[str, Any] = {"device_map": {"": main_device()}}
    if placement is not None:
        options = {"device_map": placement}
    elif where.startswith("auto-"):
        options = {"device_map": "auto", "max_memory": {0: f"{where.removeprefix('auto-')}GiB", "cpu": "100GiB"}}
    elif where in SPLIT and not on_cpu:
        options = {"device_map": device_map(where, folder)}
    if where != "bf16":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
            llm_int8_enable_fp32_cpu_offload=not on_cpu,
            llm_int8_skip_modules=skipped(folder),
        )
    with contextlib.ExitStack() as stack:
        if where != "bf16" and not on_cpu:
            stack.enter_context(gemma4_compat.quantize(offloaded=True))
            stack.enter_context(gemma4_compat.quantize(experts=True))
        kind = getattr(transformers, tiny_models.class_name(checkpoint))
        model = _loaded(kind, folder, weights, options)
    model = model.eval()
    if where in SPLIT and on_cpu:  # a quantized model refuses disk entries at from_pretrained
        on_disk = tempfile.mkdtemp(prefix="offload-", dir=folder)
        model = tiny.dispatch(model, device_map(where, folder), Path(on_disk))
    return model


def _loaded(kind: Any, folder: Path, weights: dict[str, Any] | None, options: dict[str, Any]) -> Any:
    import torch

    if weights is None:
        return kind.from_pretrained(folder / "checkpoint", dtype=torch.bfloat16, **options)
    given = {"config": config_of(folder), "state_dict": dict(weights)}
    return kind.from_pretrained(None, dtype=torch.bfloat16, **given, **options)


def upstream(where: str, folder: Path, weights: dict[str, Any] | None = None) -> Any:
    """What :func:`load` loads, by upstream's calls alone: bf16, or 4-bit where ``where`` is not "bf16"."""
    import torch
    import transformers

    checkpoint = folder / "checkpoint"
    kind = getattr(transformers, tiny_models.class_name(checkpoint))
    options: dict[str, Any] = {"device_map": device_map(where, folder) if where in SPLIT else {"": main_device()}}
    if where != "bf16":
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
            llm_int8_enable_fp32_cpu_offload=where in SPLIT,
            llm_int8_skip_modules=skipped(folder),
        )
    return _loaded(kind, folder, weights, options).eval()


def planned_gib(where: str, adapter: bool, folder: Path, placement: dict[str, Any], prompt: int, new: int) -> Any:
    """What the planner expects the main device to hold with replay at most: in the prefill, while decoding, in both;
    and of that, the memory pool of the graphs.
    """
    use = small_card_measure.planned_use(
        folder,
        placement,
        quantization=None if where == "bf16" else "4bit-double",
        skip=skipped(folder),
        adapter=adapter,
        quantize_offloaded=True,
        experts=where != "bf16",
        fast=True,
    )(prompt + new, prompt)
    found = {"prefill": use.prefill, "decode": use.decode, "peak": max(use.prefill, use.decode), "graph": use.graph}
    return {name: nbytes / GIB for name, nbytes in found.items()}


def adapt(model: Any, folder: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(model, folder / "adapter").eval()


def base(model: Any) -> Any:
    """The Gemma 4 in it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def text_prompt(model: Any, length: int, *, batch: int = 1, seed: int = 7) -> dict[str, Any]:
    """Random tokens; of a batch, every second sequence is shorter and padded on the left."""
    import torch

    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, min(250_000, vocabulary - 16), (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, batch, 2):
        mask[row, : max(1, length // 4)] = 0
        ids[row, : max(1, length // 4)] = 0
    return {"input_ids": ids.to(main_device()), "attention_mask": mask.to(main_device())}


def image_prompt(model: Any) -> dict[str, Any]:
    """A text prompt with one random image in it."""
    if not tiny.towers(base(model)) or base(model).config.model_type == "gemma4":
        return small_card_models.image_prompt(model)
    import torch

    vision, edge = model.config.vision_config, 2
    batch = {name: value.cpu() for name, value in text_prompt(model, small_card_models.PROMPT).items()}
    batch["input_ids"][0, 4 : 4 + edge**2] = model.config.image_token_id
    grid, side = torch.arange(edge), vision.patch_size * vision.pooling_kernel_size
    batch["image_position_ids"] = torch.stack(torch.meshgrid(grid, grid, indexing="xy"), -1).reshape(1, edge**2, 2)
    batch["pixel_values"] = torch.rand(1, edge**2, 3 * side**2, generator=torch.Generator().manual_seed(8))
    batch["mm_token_type_ids"] = (batch["input_ids"] == model.config.image_token_id).long()
    return {name: value.to(main_device()) for name, value in batch.items()}


def cut_down(shape: str, folder: Path) -> str | None:
    """In words, how many of its layers a shape has, where that is not all."""
    layers = SHAPES[shape][1]
    if layers is None:
        return None
    file = folder / "checkpoint" / "config.json"
    kept = json.loads(file.read_text(encoding="utf-8"))["text_config"]["num_hidden_layers"]
    return f"the first {kept} of the {len(variants.shape(SHAPES[shape][0])['layer_types'])} layers"
