"""What does Gemma 4 on a small card cost: VRAM, speed and parity of each placement, against everything on the GPU?

python benchmarks/small_card.py --shape E2B|E4B --out FILE.json [--cases A,B] [--quick] [--minutes N]

Random weights in the real shape (no network), 4-bit with double quantization, towers in bf16. Each case runs in a
process of its own, and the file is written after each. Everything on the GPU is measured first and again last, and
shares refer to the mean of the two, because machines drift: compare inside one run only. A case that crashes is a
result. Exit code 1: a case with the shim on raised, or its answers are not those of the same weights on the GPU, or
there was no time for it.

`--shape tiny` runs without a GPU, too: the main device is then the CPU, and "disk" the place of what is offloaded.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import json
import platform
import queue
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import common  # noqa: E402
from common import MARK  # noqa: E402

import gemma4_compat  # noqa: E402  (before the libraries, as a user would)
from gemma4_compat._doctor import findings  # noqa: E402
from gemma4_compat._reproduction import tiny  # noqa: E402

GIB = 2**30
PROMPT = 64
NEW_TOKENS = 32
RUNS = 3
#: How often a case and everything on the GPU are timed in turns, and the tokens of a turn.
TURNS = 6
TURN_TOKENS = 16
#: A generate, or a forward, that takes longer than this is timed once.
SLOW_S = 6.0
CASE_TIMEOUT_S = 170

TABLE = "model.language_model.embed_tokens_per_layer"
TOWERS = ("model.vision_tower", "model.audio_tower")
LAYER = "model.language_model.layers.{}"
#: What a case may offload: names to a number of decoder layers, spread evenly, a share of all where it is below 1.
LAYERS = {"layers-few": 8, "layers-half": 20, "layers-all": 1.0}


@dataclass(frozen=True)
class Case:
    """One placement.

    Attributes:
        who: "reference" (everything on the GPU), "upstream" (shim off) or "ours".
        what: the placement in words.
        offload: parts of the model that go to ``to``: "table", "towers", and a name of :data:`LAYERS`.
        to: "cpu" or "disk".
        quantize: offloaded decoder layers are quantized as well (``gemma4_compat.quantize_offloaded``).
        adapter: a rank-16 LoRA adapter on every decoder layer is loaded.
        double: quantize the scales, too.
        unquantized: a name of :data:`LAYERS`: layers that stay in bf16 on the GPU.
        budget: ``device_map="auto"`` with the shape's budget of this number.
        reference: the case with whose answers these must agree.
        quantize_towers: the towers and what follows them are quantized, too.
    """

    who: str
    what: str
    offload: tuple[str, ...] = ()
    to: str = "cpu"
    quantize: bool = False
    adapter: bool = False
    double: bool = True
    unquantized: str | None = None
    budget: int | None = None
    reference: str = "all-gpu"
    quantize_towers: bool = False

    @property
    def answers(self) -> str:
        """Name of the reference's answers that are its own."""
        return f"{self.reference}-adapter" if self.adapter else self.reference


EVERYTHING = ("table", "towers", "layers-all")
#: In the order in which they run: with little time left the last ones are missing.
CASES: dict[str, Case] = {
    "all-gpu": Case("reference", "everything on the GPU"),
    "all-gpu-bf16": Case("reference", "the same, some layers not quantized", unquantized="layers-few"),
    "all-gpu-single": Case("reference", "the same, single quantization", double=False),
    "table": Case("ours", "per-layer table on the CPU", ("table",)),
    "table-towers": Case("ours", "table and towers on the CPU", ("table", "towers")),
    "everything": Case("ours", "table, towers and all decoder layers on the CPU", EVERYTHING, quantize=True),
    "upstream-table-towers": Case("upstream", "table and towers on the CPU", ("table", "towers")),
    "layers-few": Case("ours", "some decoder layers on the CPU, 4-bit", ("layers-few",), quantize=True),
    "upstream-layers-few": Case(
        "upstream", "some decoder layers on the CPU, bf16", ("layers-few",), reference="all-gpu-bf16"
    ),
    "layers-half": Case("ours", "about half of the decoder layers on the CPU, 4-bit", ("layers-half",), quantize=True),
    "layers-all": Case("ours", "all decoder layers on the CPU, 4-bit", ("layers-all",), quantize=True),
    "everything-adapter": Case(
        "ours",
        "everything but the embedding on the CPU, adapter on all layers",
        EVERYTHING,
        quantize=True,
        adapter=True,
    ),
    "auto-1": Case("ours", 'device_map="auto", smallest budget', budget=0),
    "auto-2": Case("ours", 'device_map="auto", 2 GiB', budget=1),
    "auto-3": Case("ours", 'device_map="auto", 3 GiB', budget=2),
    "upstream-auto-1": Case("upstream", 'device_map="auto", smallest budget', budget=0),
    "layers-few-bf16": Case("ours", "some decoder layers on the CPU, bf16", ("layers-few",), reference="all-gpu-bf16"),
    "everything-single": Case(
        "ours",
        "table, towers and all decoder layers on the CPU, single quantization",
        EVERYTHING,
        quantize=True,
        double=False,
        reference="all-gpu-single",
    ),
    "table-disk": Case("ours", "per-layer table on disk", ("table",), to="disk"),
    "upstream-table": Case("upstream", "per-layer table on the CPU", ("table",)),
}
#: Cases that are timed in turns with everything on the GPU.
PAIRED = (
    *("table", "table-towers", "layers-few", "layers-half", "layers-all"),
    *("everything", "everything-adapter", "auto-1", "table-disk"),
)
QUICK = ("all-gpu", "table-towers", "everything", "upstream-table-towers")


@dataclass(frozen=True)
class Shape:
    """What is built and how long its prompts are. ``budgets`` are GiB for ``device_map="auto"``."""

    text: dict[str, Any]
    prefill: tuple[int, ...] = (512, 2048, 4096)
    budgets: tuple[float, ...] = ()
    checkpoint_gib: float = 0.1


_COMMON = {
    "vocab_size": 262144,
    "num_attention_heads": 8,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "final_logit_softcapping": 30.0,
}
SHAPES = {
    "E2B": Shape(
        _COMMON
        | {
            "hidden_size": 1536,
            "intermediate_size": 6144,
            "use_double_wide_mlp": True,
            "num_hidden_layers": 35,
            "num_kv_shared_layers": 20,
            "num_key_value_heads": 1,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        },
        budgets=(1.2, 2.0, 3.0),
        checkpoint_gib=11,
    ),
    "E4B": Shape(
        _COMMON
        | {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 42,
            "num_kv_shared_layers": 18,
            "num_key_value_heads": 2,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 7,
        },
        budgets=(1.6, 2.0, 3.0),
        checkpoint_gib=17,
    ),
    "tiny": Shape(tiny.text_shape(), prefill=(16, 64)),
}


def layer_names(shape: str, which: str) -> list[str]:
    """Names of that many decoder layers; for the tiny shape a third and two thirds."""
    count, wanted = SHAPES[shape].text["num_hidden_layers"], LAYERS[which]
    if shape == "tiny" and wanted != 1.0:
        wanted = count // 3 if which == "layers-few" else 2 * count // 3
    number = count if wanted == 1.0 else int(wanted)
    return [LAYER.format(index * count // number) for index in range(number)]


def offloaded_names(shape: str, case: Case) -> list[str]:
    names: list[str] = []
    for part in case.offload:
        names += {"table": [TABLE], "towers": list(TOWERS)}.get(part) or layer_names(shape, part)
    return names


# In a child


def main_device() -> Any:
    import torch

    return 0 if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def memory() -> dict[str, float | None]:
    """What is allocated now and was at most since the last :func:`forget_peak`; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return dict.fromkeys(("resident_gib", "peak_gib", "peak_reserved_gib"))
    synchronize()
    return {
        "resident_gib": torch.cuda.memory_allocated() / GIB,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "peak_reserved_gib": torch.cuda.max_memory_reserved() / GIB,
    }


def forget_peak() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def build(shape: str, folder: Path, *, everywhere: bool = False) -> dict[str, Any]:
    """The checkpoint and the adapter; what the machine is; how fast it copies.

    The adapter is for the language model; ``everywhere``: for the towers, too, see :func:`write_adapters`.
    """
    import torch
    from transformers import Gemma4ForConditionalGeneration
    from transformers.models.gemma4 import configuration_gemma4 as gemma4

    started = time.perf_counter()
    checkpoint, adapter = folder / "checkpoint", folder / "adapter"
    if shape == "tiny":
        tiny.build_checkpoint(checkpoint)
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
        write_adapter(model, adapter, tiny.TARGETS["language"], rank=4 if shape == "tiny" else 16)
    seconds = time.perf_counter() - started
    return {"parameters": parameters, "build_s": seconds, "machine": machine(), "host_to_device_gib_s": bandwidth()}


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


def machine() -> dict[str, Any]:
    import torch

    device, driver = "CPU", None
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        said = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
        device, driver = torch.cuda.get_device_name(0), said[0] if said else "unknown"
    return {
        "device": device,
        "driver": driver,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": findings.stack(),
    }


def bandwidth() -> dict[str, float] | None:
    """GiB/s of a 256 MiB copy to the GPU, from pinned and from pageable memory: the median of five."""
    import torch

    if not torch.cuda.is_available():
        return None
    target = torch.empty(GIB // 4, dtype=torch.uint8, device=0)
    found = {}
    for kind in ("pinned", "pageable"):
        source = torch.ones(GIB // 4, dtype=torch.uint8, pin_memory=kind == "pinned")
        found[kind] = 0.25 / timed(lambda source=source: target.copy_(source, non_blocking=True), runs=5)[0]
    return found


def timed(action: Callable[[], Any], *, runs: int) -> tuple[float, int]:
    """Seconds of ``action`` after a warm-up, the median, and of how many; a slow one is not repeated."""
    seconds = []
    for _ in range(runs + 1):
        synchronize()
        started = time.perf_counter()
        action()
        synchronize()
        seconds.append(time.perf_counter() - started)
        if seconds[0] > SLOW_S:
            return seconds[0], 1
    return statistics.median(seconds[1:]), runs


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
    also = gemma4_compat.quantize_offloaded() if case.quantize and main != "cpu" else contextlib.nullcontext()
    with also:
        model = Gemma4ForConditionalGeneration.from_pretrained(
            checkpoint, dtype=torch.bfloat16, quantization_config=quantization(shape, case), **options
        ).eval()
    if offloaded and main == "cpu":  # a quantized model refuses disk entries at from_pretrained
        model = tiny.dispatch(model, whole_map(checkpoint, offloaded, "disk"), on_disk)
    return model


class Clock:
    """A streamer that notes when each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        """The prompt first, then one token a call; ``generate`` has copied it to the CPU, so the GPU is done."""
        self.times.append(time.perf_counter())

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


def generate(model: Any, tokens: int = NEW_TOKENS) -> tuple[Any, Clock]:
    clock = Clock()
    produced = model.generate(
        input_ids=prompt(model, PROMPT),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        streamer=clock,
    )
    return produced.cpu(), clock


def answers(model: Any, tokens: int = NEW_TOKENS) -> tuple[Any, Clock]:
    """Three forwards on text, one with an image, and a generate of so many ``tokens``."""
    from gemma4_compat._engine.patch import FORWARDS
    from gemma4_compat._reproduction.workspace import Answers

    image = image_prompt(model)
    logits = [model(input_ids=prompt(model, PROMPT)).logits.float().cpu() for _ in range(FORWARDS)]
    logits.append(model(**image).logits.float().cpu())
    produced, clock = generate(model, tokens)
    return Answers(tuple(logits), produced), clock


def speed(model: Any, shape: str, first: Clock, *, quick: bool) -> dict[str, Any]:
    """Prefill and decode, each with what it took of the card. ``first`` is a generate that has already run."""
    prefill = {}
    for length in SHAPES[shape].prefill:
        forget_peak()
        ids = prompt(model, length)
        seconds, runs = timed(lambda ids=ids: model(input_ids=ids, logits_to_keep=1), runs=1 if quick else RUNS)
        prefill[str(length)] = {"ms": 1000 * seconds, "runs": runs, **memory()}
    forget_peak()
    slow = first.times[-1] - first.times[0] > SLOW_S
    rates = [generate(model)[1].tokens_per_second for _ in range(1 if quick or slow else RUNS)]
    decode = {"tok_s": statistics.median(rates), "tok_s_of_runs": rates, **memory()}
    return {"prefill": prefill, "decode": decode}


def paired(model: Any, case: Case, shape: str, folder: Path) -> dict[str, Any]:
    """Speed as a share of everything on the GPU, both in this process and in turns: machines drift within seconds.

    The reference has the same adapter. What else runs on the host can only slow a turn down, so the best turn of each
    counts: ``share`` is of decode speed (case / reference), ``times`` of prefill time (case / reference). All turns
    are in the result.
    """
    from peft import PeftModel

    whole = load(shape, CASES[case.answers if not case.adapter else "all-gpu"], folder)
    if case.adapter:
        whole = PeftModel.from_pretrained(whole, folder / "adapter").eval()

    def rate(which: Any) -> float:
        return float(generate(which, TURN_TOKENS)[1].tokens_per_second)

    def seconds(which: Any, ids: Any) -> float:
        synchronize()
        started = time.perf_counter()
        which(input_ids=ids, logits_to_keep=1)
        synchronize()
        return time.perf_counter() - started

    rate(whole)
    rates = [(rate(whole), rate(model)) for _ in range(TURNS)]
    times = {}
    for length in SHAPES[shape].prefill:
        ids = prompt(model, length)
        seconds(whole, ids), seconds(model, ids)
        times[str(length)] = [(seconds(whole, ids), seconds(model, ids)) for _ in range(TURNS // 2)]
    return {
        "share": max(own for _, own in rates) / max(reference for reference, _ in rates),
        "times": {
            length: min(own for _, own in turns) / min(reference for reference, _ in turns)
            for length, turns in times.items()
        },
        "tok_s_of_turns": rates,
        "seconds_of_turns": times,
    }


def streamed_bytes(model: Any) -> int:
    """Bytes of offloaded decoder layers, scales included: what a token brings over the bus."""
    from gemma4_compat._quantization.bytes import stored_bytes

    return sum(
        stored_bytes(parameter)
        for name, parameter in model.named_parameters()
        if ".layers." in name and "language_model" in name and parameter.device.type == "meta"
    )


def predicted(shape: str, case: Case, folder: Path, placement: dict[str, Any]) -> dict[str, Any]:
    """GiB that the planner's model of memory gives for this placement, phase by phase, as they are measured."""
    import torch
    from transformers import AutoConfig, Gemma4ForConditionalGeneration

    from gemma4_compat._planner import blueprint as _blueprint
    from gemma4_compat._planner import cost, layout
    from gemma4_compat._quantization import config

    with torch.device("meta"):
        model = Gemma4ForConditionalGeneration(AutoConfig.from_pretrained(folder / "checkpoint")).to(torch.bfloat16)
    skip = quantization(shape, case).llm_int8_skip_modules
    blueprint = _blueprint.describe(
        model,
        "4bit-double" if case.double else "4bit",
        config.linear_names(model, skip),
        adapter=_blueprint.adapter_sizes(folder / "adapter") if case.adapter else None,
    )

    def place(name: str) -> str:
        """Of the longest entry at or above ``name``."""
        parts = name.split(".")
        above = [".".join(parts[:end]) for end in range(len(parts), -1, -1)]
        return str(next(placement[key] for key in above if key in placement))

    away = [block for block in blueprint.blocks if place(block.name) in _away()]
    resident = [block for block in blueprint.blocks if block not in away]
    paged = [block for block in away if block.kind == "layer"]

    def use(context: int, tokens: int) -> layout.Use:
        return layout.use_of(
            blueprint,
            resident,
            paged,
            [block for block in away if block.kind != "layer"],
            cost.Load(context=context, prompt=tokens),
            budget=0,
            main=True,
            quantize_offloaded=case.quantize or case.budget is not None,
        )

    lengths = SHAPES[shape].prefill
    return {
        "load": use(PROMPT, PROMPT).loading / GIB,
        "prefill": {str(length): use(length, length).prefill / GIB for length in lengths},
        "decode": use(PROMPT + NEW_TOKENS, PROMPT).decode / GIB,
    }


def _away() -> tuple[str, ...]:
    """Places that are not where the model computes."""
    return ("disk",) if main_device() == "cpu" else ("cpu", "disk")


def run(name: str, shape: str, folder: Path, *, quick: bool, say: Callable[[dict[str, Any]], None]) -> None:
    """Measure one case; what is known is said at once, so that a crash leaves it."""
    import torch
    from peft import PeftModel

    from gemma4_compat._reproduction.workspace import difference

    again = name == "all-gpu-again"
    case = CASES["all-gpu" if again else name]
    forget_peak()
    started = time.perf_counter()
    model = load(shape, case, folder)
    synchronize()
    load_seconds = time.perf_counter() - started
    placement = {key: str(value) for key, value in getattr(model, "hf_device_map", {}).items()}
    say(
        {
            "load": {"seconds": load_seconds, **memory()},
            "quantized_modules": sum(type(item).__name__ == "Params4bit" for item in model.parameters()),
            "offloaded": {
                place: [key for key, value in placement.items() if value == place]
                for place in _away()
                if place in placement.values()
            },
        }
    )
    if case.budget is not None:
        say({"budget_gib": SHAPES[shape].budgets[case.budget]})
    if case.who == "ours":
        off = {key: str(status.state) for key, status in gemma4_compat.status().items() if status.state != "applied"}
        say({"patches_not_applied": off})
        say({"predicted_gib": predicted(shape, case, folder, placement)})
    if case.adapter:
        started = time.perf_counter()
        model = PeftModel.from_pretrained(model, folder / "adapter").eval()
        synchronize()
        say({"adapter_load": {"seconds": time.perf_counter() - started, **memory()}})
    with torch.no_grad():
        seen, clock = answers(model)
        if case.who == "reference":
            if not again:
                torch.save(seen, folder / f"{name}.pt")
            else:
                say({"parity": difference(torch.load(folder / "all-gpu.pt", weights_only=False), seen)})
        else:
            parity = difference(torch.load(folder / f"{case.answers}.pt", weights_only=False), seen)
            say({"parity": parity, "streamed_bytes": streamed_bytes(model)})
        if name in ("all-gpu-single", "all-gpu-bf16"):
            return
        in_turns = case.who == "ours" and name in PAIRED and not quick
        say(speed(model, shape, clock, quick=quick or in_turns))
        if in_turns:
            say({"paired": paired(model, case, shape, folder)})
        if name == "all-gpu" and not quick:
            model = PeftModel.from_pretrained(model, folder / "adapter").eval()
            seen, clock = answers(model)
            torch.save(seen, folder / "all-gpu-adapter.pt")
            say({"with_adapter": speed(model, shape, clock, quick=True)})


def child() -> int:
    """Import everything, wait for one line of JSON that says what to do, do it."""
    import bitsandbytes  # noqa: F401
    import peft  # noqa: F401
    from transformers import Gemma4ForConditionalGeneration  # noqa: F401

    line = sys.stdin.readline()
    if not line:
        return 0
    order = json.loads(line)
    folder = Path(order["folder"])

    def say(data: dict[str, Any]) -> None:
        print(f"{MARK}{json.dumps(data)}", flush=True)

    say({})  # the next child may start its imports
    try:
        if order["name"] == "build":
            say(build(order["shape"], folder))
        else:
            run(order["name"], order["shape"], folder, quick=order["quick"], say=say)
    except Exception as error:  # noqa: BLE001  (a crash is a result)
        say({"error": common.told(error, folder)})
    return 0


# The parent


class Child(common.Process):
    """A process that has its imports behind it when it is told what to do; it takes one order."""

    def __call__(self, order: dict[str, Any], timeout: float, begun: Callable[[], None]) -> dict[str, Any]:
        """What it says, merged. ``begun`` is called as soon as it has started on the order."""
        end, first = time.monotonic() + timeout, True
        result: dict[str, Any] = {}
        self.send(order)
        while True:
            try:
                line = self.said(end - time.monotonic())
            except queue.Empty:
                result["error"] = f"no end after {timeout:.0f} s"
                break
            if line is None:
                if ended := self.end():
                    result["error"] = ended
                break
            if line.startswith(MARK):
                result.update(json.loads(line.removeprefix(MARK)))
                if first:
                    first = False
                    begun()
        self.close()
        return result


class Children:
    """Runs orders one after another; the next one's process imports while the one before loads its model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started = 0
        self.waiting: dict[bool, Child] = {}

    def start(self, shim: bool) -> None:
        """Have a process with these settings ready."""
        if shim not in self.waiting:
            self.started += 1
            self.waiting[shim] = Child(Path(__file__), shim=shim, log=self.folder / f"log-{self.started}.txt")

    def run(self, order: dict[str, Any], *, shim: bool, following: bool | None, timeout: float) -> dict[str, Any]:
        """The answer to an order. ``following``: the settings of the next one; None: there is none."""
        self.start(shim)
        started = time.monotonic()
        order = {"folder": str(self.folder), **order}
        begun = (lambda: None) if following is None else (lambda: self.start(following))
        result = self.waiting.pop(shim)(order, timeout, begun)
        return {"error": None, **result, "wall_s": time.monotonic() - started}

    def close(self) -> None:
        """End what is still waiting."""
        for process in self.waiting.values():
            process.close()


def work_folder(shape: str) -> Path:
    """In memory where it fits: reading the checkpoint is then the same for every case."""
    memory = Path("/dev/shm")
    needed = 1.15 * SHAPES[shape].checkpoint_gib * GIB
    return memory if memory.is_dir() and shutil.disk_usage(memory).free > needed else Path(tempfile.gettempdir())


def selected(wanted: list[str], shape: str, gpu: bool) -> list[str]:
    """The cases to run, with the references they need, in the order of :data:`CASES`."""
    names = set(wanted) | {"all-gpu"} | {CASES[name].reference for name in wanted}
    auto = gpu and SHAPES[shape].budgets
    return [name for name in CASES if name in names and (CASES[name].budget is None or auto)]


def shares(cases: dict[str, Any]) -> dict[str, Any]:
    """Everything on the GPU, first and last, with their mean, which the shares refer to; adds shares to the cases."""
    both = [cases[name] for name in ("all-gpu", "all-gpu-again") if "decode" in cases.get(name, {})]
    if not both:
        return {}
    rates = [entry["decode"]["tok_s"] for entry in both]
    lengths = [length for length in both[0]["prefill"] if all(length in entry["prefill"] for entry in both)]
    times = {length: [entry["prefill"][length]["ms"] for entry in both] for length in lengths}
    for entry in cases.values():
        if "decode" in entry and "earlier_run" not in entry:
            entry["decode_share"] = entry["decode"]["tok_s"] / statistics.mean(rates)
            entry["prefill_times"] = {
                length: entry["prefill"][length]["ms"] / statistics.mean(times[length])
                for length in lengths
                if length in entry["prefill"]
            }
        if "paired" in entry:
            entry["decode_share"], entry["prefill_times"] = entry["paired"]["share"], entry["paired"]["times"]
    return {"decode_tok_s": rates, "decode_tok_s_mean": statistics.mean(rates), "prefill_ms": times}


def problems(cases: dict[str, Any]) -> list[str]:
    """What makes the run a failure: cases with the shim on that raised or do not agree, and references that failed."""
    found = []
    for name, entry in cases.items():
        if entry["who"] == "upstream":
            continue
        if entry["error"] is not None:
            found.append(f"{name}: {entry['error']}")
        elif entry.get("parity", 0.0) != 0.0:
            found.append(f"{name}: answers differ by {entry['parity']} from the same weights on the GPU")
    return found


def line(name: str, entry: dict[str, Any]) -> str:
    if entry["error"] is not None:
        return f"{name:<22} {entry['error'][:150]}"
    parts = [f"{name:<22} load {entry['load']['seconds']:6.1f} s"]
    if "decode" in entry:
        decode = entry["decode"]
        peak = "" if decode["peak_gib"] is None else f"{decode['resident_gib']:.2f}/{decode['peak_gib']:.2f} GiB "
        parts.append(f"decode {decode['tok_s']:7.2f} tok/s {peak}")
    if "paired" in entry:
        times = " ".join(f"{value:.2f}" for value in entry["paired"]["times"].values())
        parts.append(f"share {entry['paired']['share']:.3f} prefill x {times}")
    if "parity" in entry:
        parts.append(f"parity {entry['parity']}")
    return "  ".join([*parts, f"({entry['wall_s']:.0f} s)"])


def measure(
    shape: str,
    wanted: list[str],
    *,
    out: Path | None = None,
    quick: bool = False,
    minutes: float = 8.5,
    folder: Path | None = None,
    earlier: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Build the checkpoint, run the cases, and write ``out`` after each one.

    Cases of an ``earlier`` result of the same shape that are not run again stay, with the shares of their own run.
    """
    deadline = time.monotonic() + 60 * minutes
    result: dict[str, Any] = {
        "question": common.question(sys.modules[__name__]),
        "shape": shape,
        "date": datetime.date.today().isoformat(),
        "gemma4_compat": gemma4_compat.__version__,
        "settings": {"prompt": PROMPT, "new_tokens": NEW_TOKENS, "runs": 1 if quick else RUNS, "quick": quick},
        "reference": {},
        "problems": [],
    }
    cases: dict[str, Any] = {}
    for name, entry in (earlier or {}).get("cases", {}).items():
        if entry["error"] is None and not name.startswith("all-gpu"):
            cases[name] = {**entry, "earlier_run": entry.get("earlier_run", (earlier or {})["reference"])}

    def write() -> None:
        result["reference"] = shares(cases)
        result["problems"] = problems(cases)
        result["cases"] = cases
        common.write(result, out)

    with common.temporary("small-card-", folder or work_folder(shape)) as work:
        children = Children(work)
        try:
            built = children.run({"name": "build", "shape": shape}, shim=True, following=True, timeout=CASE_TIMEOUT_S)
            error, seconds = built.pop("error"), built.pop("wall_s")
            if error is not None:
                raise SystemExit(f"the checkpoint could not be built: {error}")
            result.update(built)
            print(f"built {built['parameters'] / 1e9:.2f} billion parameters in {seconds:.0f} s", flush=True)
            names = [*selected(wanted, shape, gpu=built["host_to_device_gib_s"] is not None), "all-gpu-again"]
            reserve = 0.0
            for name, after in zip(names, [*names[1:], None]):
                case = CASES["all-gpu" if name == "all-gpu-again" else name]
                entry: dict[str, Any] = {"who": case.who, "what": case.what, "error": None}
                if case.offload:
                    parts = [part for part in case.offload if part in LAYERS]
                    entry["layers"] = sum(len(layer_names(shape, part)) for part in parts)
                left = deadline - time.monotonic() - (0 if after is None else reserve)
                if left < 0.7 * reserve and after is not None:
                    cases[name] = {**entry, "error": "not run: no time left"}
                else:
                    shim = CASES[after].who != "upstream" if after in CASES else True
                    order = {"name": name, "shape": shape, "quick": quick}
                    entry |= children.run(
                        order,
                        shim=case.who != "upstream",
                        following=None if after is None else shim,
                        timeout=CASE_TIMEOUT_S if after is None else min(CASE_TIMEOUT_S, max(left, 20.0)),
                    )
                    cases[name] = entry
                    if name == "all-gpu":
                        reserve = entry["wall_s"]
                write()
                print(line(name, cases[name]), flush=True)
                if name == "all-gpu" and cases[name]["error"] is not None:
                    break  # nothing to compare with
        finally:
            children.close()
    return result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--shape", choices=sorted(SHAPES), help="what is built")
    parser.add_argument("--cases", help=f"separated by commas; default: all of {', '.join(CASES)}")
    parser.add_argument("--quick", action="store_true", help=f"{', '.join(QUICK)} only, each timed once")
    parser.add_argument("--minutes", type=float, default=8.5, help="start no case that would end later (default: 8.5)")
    parser.add_argument("--out", type=Path, help="write the result here after every case")
    parser.add_argument("--add-to", type=Path, help="keep the cases of this earlier result that are not run again")
    parser.add_argument("--work", type=Path, help="folder for the checkpoint (default: /dev/shm, or a temporary one)")
    arguments = parser.parse_args(argv)
    if arguments.child:
        return child()
    if arguments.shape is None:
        parser.error("--shape is required")
    wanted = arguments.cases.split(",") if arguments.cases else list(QUICK if arguments.quick else CASES)
    if unknown := [name for name in wanted if name not in CASES]:
        parser.error(f"unknown cases: {', '.join(unknown)}")
    earlier = None
    if arguments.add_to is not None:
        earlier = json.loads(arguments.add_to.read_text(encoding="utf-8"))
        if earlier["shape"] != arguments.shape:
            parser.error(f"{arguments.add_to} holds a result of {earlier['shape']}, not of {arguments.shape}")
    result = measure(
        arguments.shape,
        wanted,
        out=arguments.out,
        quick=arguments.quick,
        minutes=arguments.minutes,
        folder=arguments.work,
        earlier=earlier,
    )
    for problem in result["problems"]:
        print(f"PROBLEM {problem}", file=sys.stderr)
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
