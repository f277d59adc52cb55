"""How much host memory and time do merge, repair and export take, against reading the checkpoint once and writing it
once?

python benchmarks/adapters/checkpoints.py [--shape E4B|E2B|tiny] [--work FOLDER] [--rounds 3]
    [--ways copy,merge] [--json FILE]

A random checkpoint in bf16 (E4B: 16 GB in the real shape; E2B: with a quarter of the rows of its per-layer embeddings)
with keys and values of KV-shared layers, one without, and a LoRA of rank 16 on every linear layer of the language
model. Ways, each in a process of its own, by turns:

copy         the files of the checkpoint without, with the buffer and the `fsync` of the others
repair       `gemma4_compat.repair_checkpoint`
merge        `gemma4_compat.merge_adapter`, without its check
dequantized  the same into weights that went to nested 4 bits and back, once: it quantizes on the CPU
quantized    `merge` with a result in nested 4 bits, once
export       `gemma4_compat.export_adapter` for vLLM, which reads the adapter alone

Memory is the peak resident set minus what the imports had taken. Takes three times the checkpoint on disk, removed at
the end.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common

WAYS = ("copy", "repair", "merge", "dequantized", "quantized", "export")
ONCE = ("dequantized", "quantized")
PIECE = 64 << 20
RANK = 16
#: What the commands import, before memory and time are counted.
IMPORTED = (
    "bitsandbytes",
    "gemma4_compat._adapter_tools.merge.job",
    "gemma4_compat._adapter_tools.merge.weights",
    "peft",
    "transformers.models.gemma4.modeling_gemma4",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("E4B", "E2B", "tiny"), default="E4B")
    parser.add_argument("--work", type=Path, help="folder for the checkpoints (default: a temporary one)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)}")
    parser.add_argument("--json", type=Path, help="write the result here too")
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        what, folder = arguments.child[0], Path(arguments.child[1])
        print("\n" + json.dumps(build(arguments.shape, folder) if what == "build" else measured(what, folder)))
        return 0
    ways = arguments.ways.split(",")
    if unknown := [way for way in ways if way not in WAYS]:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(WAYS)}")
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=arguments.work) as work:
        for result in run(arguments.shape, Path(work), arguments.rounds, ways):
            common.write(result, arguments.json)
    print(json.dumps(result, indent=1))
    return 0


def run(shape: str, work: Path, rounds: int, ways: list[str]) -> Iterator[dict[str, Any]]:
    """The result so far, after each measurement."""
    # Not here: a child's peak begins with what its parent holds.
    built = common.child(Path(__file__), shape, "build", work)
    begins = header(shape, built)
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for number in range(rounds):
        for way in ways[:: 1 if number % 2 == 0 else -1]:
            if number == 0 or way not in ONCE:
                found[way].append(common.child(Path(__file__), shape, way, work))
                print(way, found[way][-1], file=sys.stderr, flush=True)
                yield begins | {"ways": {name: summary(items, found) for name, items in found.items() if items}}


def header(shape: str, built: dict[str, Any]) -> dict[str, Any]:
    """What a result begins with."""
    return {
        "question": "peak host memory and time of merge, repair and export, against a copy of the checkpoint",
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("torch", "transformers", "peft", "bitsandbytes")},
        "shape": shape,
        **built,
    }


def summary(items: list[dict[str, Any]], found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Seconds of each run, and of them the median, also as a multiple of the copy's; the largest peak in bytes."""
    seconds = [item["seconds"] for item in items]
    median = statistics.median(seconds)
    copies = [item["seconds"] for item in found.get("copy", [])]
    copied = statistics.median(copies) if copies else None
    return {
        "seconds": seconds,
        "median_seconds": median,
        "of_copy": None if not copied else round(median / copied, 2),
        "peak": max(item["peak"] for item in items),
        "written": items[0]["written"],
    }


def build(shape: str, work: Path) -> dict[str, Any]:
    """Write both checkpoints and the adapter."""
    import torch
    from accelerate import init_empty_weights
    from transformers import Gemma4ForConditionalGeneration

    from gemma4_compat._gemma4.checkpoint import shards
    from gemma4_compat._gemma4.models import shared_weights, variants
    from gemma4_compat._lab import tiny_configs

    config = tiny_configs.config(variant="E2B") if shape == "tiny" else variants.config(shape)
    if shape == "E2B":
        config.text_config.vocab_size_per_layer_input //= 4
    with init_empty_weights():
        model = Gemma4ForConditionalGeneration(config)
    text = config.get_text_config()
    sizes = {name: tuple(value.shape) for name, value in model.state_dict().items() if name != "lm_head.weight"}
    whole = dict(sizes)
    for layer in shared_weights.shared(text.num_hidden_layers, text.num_kv_shared_layers):
        like = text.layer_types.index(text.layer_types[layer])
        for name in ("k_proj", "v_proj", "k_norm"):
            path = "model.language_model.layers.{}.self_attn.{}.weight"
            whole[path.format(layer, name)] = sizes[path.format(like, name)]
    generator = torch.Generator().manual_seed(0)

    def pieces(shape: tuple[int, ...]) -> Iterator[Any]:
        left = torch.Size(shape).numel()
        while left:
            count = min(left, PIECE // 2)
            yield torch.empty(count, dtype=torch.bfloat16).normal_(generator=generator)
            left -= count

    for folder, tensors in ((work / "original", whole), (work / "saved", sizes)):
        folder.mkdir()
        outputs = [shards.Output(name, "bfloat16", size) for name, size in tensors.items()]
        values = {name: lambda size=size: pieces(size) for name, size in tensors.items()}
        shards.write(folder, shards.shards(outputs, 5 * 10**9), values)
        config.save_pretrained(folder)
    write_adapter(model, work / "adapter")
    nbytes = sum(entry.nbytes for entry in shards.checkpoint(work / "saved").values())
    files = [file.stat().st_size for file in (work / "saved").glob("*.safetensors")]
    return {
        "checkpoint": nbytes,
        "shards": len(files),
        "largest_shard": max(files),
        "lost_tensors": len(whole) - len(sizes),
        "adapter": (work / "adapter" / "adapter_model.safetensors").stat().st_size,
    }


def write_adapter(model: Any, folder: Path) -> None:
    """A random LoRA on the linear layers of a language model that may be on meta."""
    import torch
    from peft import LoraConfig
    from safetensors.torch import save_file

    weights: dict[str, Any] = {}
    names: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".language_model.layers." in name:
            names.add(name.rpartition(".")[2])
            for part, size in (("A", (RANK, module.in_features)), ("B", (module.out_features, RANK))):
                key = f"base_model.model.{name}.lora_{part}.weight"
                weights[key] = torch.empty(size, dtype=torch.bfloat16).normal_(0.0, 0.02)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    layers = r".*language_model.*\.(" + "|".join(sorted(names)) + ")"
    LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=layers, task_type="CAUSAL_LM").save_pretrained(folder)


def measured(way: str, work: Path) -> dict[str, Any]:
    import resource

    import gemma4_compat

    for name in IMPORTED:
        importlib.import_module(name)
    out = work / "out"
    saved, adapter = work / "saved", work / "adapter"
    merge = functools.partial(gemma4_compat.merge_adapter, saved, adapter, out, check=0, progress=False)
    ways: dict[str, Callable[[], Any]] = {
        "copy": lambda: copy(saved, out),
        "repair": lambda: gemma4_compat.repair_checkpoint(saved, work / "original", out, progress=False),
        "merge": merge,
        "dequantized": lambda: merge(start="dequantized", quantize="4bit-double"),
        "quantized": lambda: merge(quantize_result="4bit-double"),
        "export": lambda: gemma4_compat.export_adapter(adapter, out, "vllm", base=str(saved)),
    }
    unit = 1 if sys.platform == "darwin" else 1024
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    ways[way]()
    seconds = time.perf_counter() - began
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit
    written = sum(file.stat().st_size for file in out.rglob("*"))
    shutil.rmtree(out)
    return {"seconds": round(seconds, 2), "peak": peak, "written": written}


def copy(source: Path, target: Path) -> None:
    """Every byte read once and written once."""
    target.mkdir()
    buffer = memoryview(bytearray(PIECE))
    for file in source.iterdir():
        with file.open("rb", buffering=0) as reader, (target / file.name).open("wb", buffering=0) as writer:
            while count := reader.readinto(buffer):
                writer.write(buffer[:count])
            os.fsync(writer.fileno())


if __name__ == "__main__":
    sys.exit(main())
