"""Checkpoints and adapters in real shapes with random weights, loaded as a case says, and what they are given."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gemma4_compat
from benchmarks.small_card import device as small_card_device
from benchmarks.small_card.cases import SHAPES, TOWERS, Case, layer_names, offloaded_names
from benchmarks.small_card.device import GIB, main_device
from gemma4_compat._lab import tiny, tiny_adapters, tiny_models

PROMPT = 64
NEW_TOKENS = 32


def build(shape: str, folder: Path, *, everywhere: bool = False, layers: int = 6) -> dict[str, Any]:
    """The checkpoint and the adapter; what the machine is; how fast it copies.

    The adapter is for the language model; ``everywhere``: for the towers, too, see :func:`write_adapters`. ``layers``:
    of the tiny shape.
    """
    import torch
    from transformers import Gemma4ForConditionalGeneration
    from transformers.models.gemma4 import configuration_gemma4 as gemma4

    started = time.perf_counter()
    checkpoint, adapter = folder / "checkpoint", folder / "adapter"
    if shape == "tiny":
        tiny_models.build_checkpoint(checkpoint, layers=layers)
        model = tiny.load(checkpoint)
    else:
        config = gemma4.Gemma4Config(
            text_config=gemma4.Gemma4TextConfig(**SHAPES[shape].text),
            vision_config=gemma4.Gemma4VisionConfig(use_clipped_linears=True),
            audio_config=gemma4.Gemma4AudioConfig(use_clipped_linears=True),
        )
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(main_device()):
            model = Gemma4ForConditionalGeneration(config)
        torch.set_default_dtype(torch.float32)
        model.save_pretrained(checkpoint, max_shard_size="4GB")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if everywhere:
        write_adapters(model, folder)
    else:
        write_adapter(model, adapter, tiny_adapters.TARGETS["language"], rank=4 if shape == "tiny" else 16)
    seconds = time.perf_counter() - started
    return {
        "parameters": parameters,
        "build_s": seconds,
        "machine": small_card_device.machine(),
        "host_to_device_gib_s": small_card_device.bandwidth(),
    }


def write_adapter(model: Any, folder: Path, targets: Any, *, rank: int = 16) -> None:
    """A random LoRA adapter for ``model``, which has its layers from then on."""
    import torch
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.02)
    adapted.save_pretrained(folder)


def write_adapters(model: Any, folder: Path) -> None:
    """``adapter-linear``: rank 16 on every linear of language model and towers, by its full name, so that upstream can
    load it; ``adapter``: the same weights, and targets as a user writes them (``q_proj``), as which upstream cannot.
    """
    import torch

    inside = ("model.language_model.", *(f"{tower}." for tower in TOWERS))
    names = [
        name
        for name, module in model.named_modules()
        if name.startswith(inside) and isinstance(module, torch.nn.Linear)
    ]
    write_adapter(model, folder / "adapter-linear", names)
    shutil.copytree(folder / "adapter-linear", folder / "adapter")
    file = folder / "adapter" / "adapter_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["target_modules"] = sorted({name.removesuffix(".linear").rpartition(".")[2] for name in names})
    file.write_text(json.dumps(config, indent=2), encoding="utf-8")


def work_folder(shape: str) -> Path:
    """In memory where it fits: reading the checkpoint is then the same for every case."""
    memory = Path("/dev/shm")
    needed = 1.15 * SHAPES[shape].checkpoint_gib * GIB
    return memory if memory.is_dir() and shutil.disk_usage(memory).free > needed else Path(tempfile.gettempdir())


def quantization(shape: str, case: Case) -> Any:
    import torch
    from transformers import BitsAndBytesConfig

    on_cpu = main_device() == "cpu"
    unquantized = layer_names(shape, case.unquantized) if case.unquantized else []
    if not case.quantize_towers:
        unquantized += [*TOWERS, "model.embed_vision", "model.embed_audio"]
    if on_cpu and not case.quantize:  # what from_pretrained leaves unquantized where it can offload
        unquantized += [name for name in offloaded_names(shape, case) if ".layers." in name]
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=case.double,
        bnb_4bit_compute_dtype=torch.bfloat16,
        llm_int8_enable_fp32_cpu_offload=not on_cpu,  # with the CPU as main device it would quantize nothing
        llm_int8_skip_modules=["lm_head", *unquantized],
    )


def whole_map(checkpoint: Path, offloaded: list[str], to: str) -> dict[str, Any]:
    """Every block of the model by name, so that upstream has no catch-all entry to stumble over (F14)."""
    import torch
    from transformers import AutoConfig, Gemma4ForConditionalGeneration

    with torch.device("meta"):
        model = Gemma4ForConditionalGeneration(AutoConfig.from_pretrained(checkpoint))
    placement = tiny.device_map(model, "none", main=main_device(), offloaded=to)
    unknown = [name for name in offloaded if name not in placement]
    if unknown:
        raise KeyError(f"no such modules: {unknown}")
    return placement | dict.fromkeys(offloaded, to)


def load(shape: str, case: Case, folder: Path) -> Any:
    """The base model, placed as the case says."""
    import torch
    from transformers import Gemma4ForConditionalGeneration

    checkpoint, main = folder / "checkpoint", main_device()
    options: dict[str, Any] = {"device_map": {"": main}}
    offloaded = offloaded_names(shape, case)
    on_disk = Path()
    if case.to == "disk" or main == "cpu":
        # A disk, where the work folder is in memory; a new folder, for what lies in it is read as weights (F27).
        offload = Path(tempfile.gettempdir()) / f"{folder.name}-offload"
        offload.mkdir(exist_ok=True)
        on_disk = Path(tempfile.mkdtemp(dir=offload))
    if case.budget is not None:
        budget = SHAPES[shape].budgets[case.budget]
        options = {"device_map": "auto", "max_memory": {0: f"{budget}GiB", "cpu": "100GiB"}}
    elif offloaded and main != "cpu":
        options = {"device_map": whole_map(checkpoint, offloaded, case.to)}
        if case.to == "disk":
            options["offload_folder"] = on_disk
    also = gemma4_compat.quantize(offloaded=True) if case.quantize and main != "cpu" else contextlib.nullcontext()
    with also:
        model = Gemma4ForConditionalGeneration.from_pretrained(
            checkpoint, dtype=torch.bfloat16, quantization_config=quantization(shape, case), **options
        ).eval()
    if offloaded and main == "cpu":  # a quantized model refuses disk entries at from_pretrained
        model = tiny.dispatch(model, whole_map(checkpoint, offloaded, "disk"), on_disk)
    return model


class Clock:
    """A streamer that notes when each token came, on the clock ``now``.

    It passes for one of transformers' own: with a streamer of the user's, replayed steps check every weight each time.

    ``at``: what is called after so many, of which the prompt is the first.
    """

    __module__ = "transformers.generation.streamers"

    def __init__(
        self, now: Callable[[], float] = time.perf_counter, at: Mapping[int, Callable[[], None]] | None = None
    ) -> None:
        self.now = now
        self.at = dict(at or {})
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        """The prompt first, then one token a call; ``generate`` has copied it to the CPU, so the GPU is done."""
        self.times.append(self.now())
        if (call := self.at.get(len(self.times))) is not None:
            call()

    def end(self) -> None:
        """Nothing is left to do."""

    @property
    def tokens_per_second(self) -> float:
        """Of the tokens after the first, which the prefill gives."""
        return (len(self.times) - 2) / (self.times[-1] - self.times[1])


def prompt(model: Any, length: int) -> Any:
    import torch

    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(3, min(250_000, vocabulary - 16), (1, length), generator=torch.Generator().manual_seed(7))
    return ids.to(main_device())


def image_prompt(model: Any) -> dict[str, Any]:
    """The text prompt with one random image in it, a square of 12 patches (6 for the tiny shape)."""
    import torch

    vision = model.config.vision_config
    side = 6 if vision.patch_size == 8 else 12
    soft = (side // vision.pooling_kernel_size) ** 2
    ids = prompt(model, PROMPT).cpu()
    ids[0, 4 : 4 + soft] = model.config.image_token_id
    grid = torch.arange(side)
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.rand(1, side**2, 3 * vision.patch_size**2, generator=torch.Generator().manual_seed(8)),
        "image_position_ids": torch.stack(torch.meshgrid(grid, grid, indexing="xy"), dim=-1).reshape(1, side**2, 2),
        "mm_token_type_ids": (ids == model.config.image_token_id).long(),
    }
    return {name: value.to(main_device()) for name, value in batch.items()}


def generate(model: Any, tokens: int = NEW_TOKENS, now: Callable[[], float] = time.perf_counter) -> tuple[Any, Clock]:
    clock = Clock(now)
    produced = model.generate(
        input_ids=prompt(model, PROMPT),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        streamer=clock,
    )
    return produced.cpu(), clock


def outputs(model: Any, tokens: int = NEW_TOKENS) -> tuple[Any, Clock]:
    """Three forwards on text, one with an image, and a generate of so many ``tokens``."""
    from gemma4_compat._engine.patch import FORWARDS
    from gemma4_compat._lab.workspace import Outputs

    image = image_prompt(model)
    logits = [model(input_ids=prompt(model, PROMPT)).logits.float().cpu() for _ in range(FORWARDS)]
    logits.append(model(**image).logits.float().cpu())
    produced, clock = generate(model, tokens)
    return Outputs(tuple(logits), produced), clock
