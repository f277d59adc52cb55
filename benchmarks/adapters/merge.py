"""How much host memory does a merge take, as a ratio to the largest shard and one layer, against PEFT's own way?

python benchmarks/adapters/merge.py [--shape mid|tiny] [--work FOLDER] [--json FILE]

A random checkpoint (mid: about 1 GiB in bf16, 8 layers, several shards) and a LoRA on all its linears are merged in
processes of their own: by `gemma4_compat.merge_adapter` without its check, and by `merge_and_unload` and
`save_pretrained` of a model loaded in bf16. The figure is the peak resident set minus what the imports had taken. The
two results are compared value by value. Takes three times the checkpoint on disk, removed at the end.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common

#: hidden, intermediate, layers, vocabulary, bytes of a shard
SHAPES = {"mid": (2048, 8192, 8, 32768, "256MB"), "tiny": (64, 128, 3, 256, "100KB")}
WAYS = ("merge_adapter", "merge_and_unload")
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LIBRARIES = ("torch", "transformers", "accelerate", "peft", "bitsandbytes")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="mid")
    parser.add_argument("--work", type=Path, help="folder for the checkpoints (default: a temporary one)")
    parser.add_argument("--json", type=Path, help="write the result here too")
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        what, folder = arguments.child
        measured = build(arguments.shape, Path(folder)) if what == "build" else merge(what, Path(folder))
        print("\n" + json.dumps(measured))
        return 0
    with tempfile.TemporaryDirectory(prefix="merge-", dir=arguments.work) as work:
        result = run(arguments.shape, Path(work))
    show(result)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if result["values_that_differ"] <= result["values"] // 100 else 1


def run(shape: str, work: Path) -> dict[str, Any]:
    # Not here: a child's peak begins with what its parent holds.
    built = common.child(Path(__file__), shape, "build", work)
    unit = built["largest_shard"] + built["largest_layer"]
    ways = {way: common.child(Path(__file__), shape, way, work) for way in WAYS}
    for way in ways.values():
        way["of_shard_and_layer"] = round(way["peak"] / unit, 3)
        way["of_checkpoint"] = round(way["peak"] / built["checkpoint"], 3)
    values, differ, apart = compared(work)
    return {
        "question": "peak host memory of a merge beyond the imports, against the largest shard and one layer",
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "versions": {name: version(name) for name in LIBRARIES},
        "shape": shape,
        **built,
        "ways": ways,
        "values": values,
        "values_that_differ": differ,
        "largest_difference_in_bf16_units": apart,
    }


def build(shape: str, work: Path) -> dict[str, Any]:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    from gemma4_compat._gemma4.checkpoint import shards
    from gemma4_compat._lab import tiny_configs

    hidden, intermediate, layers, vocabulary, shard = SHAPES[shape]
    sizes = {
        **tiny_configs.text_shape(9 if layers > 6 else layers),
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        "vocab_size_per_layer_input": vocabulary,
        "hidden_size_per_layer_input": 64,
        "num_attention_heads": max(2, hidden // 256),
        "head_dim": 32 if hidden < 256 else 256,
        "global_head_dim": 64 if hidden < 256 else 512,
        "num_kv_shared_layers": 0,
    }
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = Gemma4ForCausalLM(Gemma4TextConfig(**sizes))
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(work / "base", max_shard_size=shard)
    adapted = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=TARGETS))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.02)
    adapted.save_pretrained(work / "adapter")
    entries = shards.checkpoint(work / "base")
    layer = [entry.nbytes for name, entry in entries.items() if ".layers.0." in name]
    files = list((work / "base").glob("*.safetensors"))
    return {
        "checkpoint": sum(entry.nbytes for entry in entries.values()),
        "shards": len(files),
        "largest_shard": max(file.stat().st_size for file in files),
        "largest_layer": sum(layer),
        "adapter": (work / "adapter" / "adapter_model.safetensors").stat().st_size,
    }


def merge(way: str, work: Path) -> dict[str, Any]:
    import resource

    import peft
    import torch
    import transformers
    from peft import PeftModel
    from transformers import Gemma4ForCausalLM

    import gemma4_compat
    from gemma4_compat._adapter_tools.merge import (
        job,  # noqa: F401  part of the imports
        weights,  # noqa: F401  part of the imports
    )

    unit = 1 if sys.platform == "darwin" else 1024
    del peft, transformers
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    started = time.perf_counter()
    if way == "merge_adapter":
        gemma4_compat.merge_adapter(work / "base", work / "adapter", work / way, max_shard_size="256MB", check=0)
    else:
        model = Gemma4ForCausalLM.from_pretrained(work / "base", dtype=torch.bfloat16)
        merged = PeftModel.from_pretrained(model, work / "adapter").merge_and_unload()
        merged.save_pretrained(work / way, max_shard_size="256MB")
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"imports": before, "peak": after - before, "seconds": round(time.perf_counter() - started, 1)}


def compared(work: Path) -> tuple[int, int, int]:
    """Values, those that differ between the two ways, and by how many units in the last place at most."""
    import torch

    from gemma4_compat._gemma4.checkpoint import shards

    one, other = (shards.checkpoint(work / way) for way in WAYS)
    values = differ = apart = 0
    for name in one.keys() & other.keys():
        for a, b in zip(shards.pieces(one[name]), shards.pieces(other[name])):
            values += a.numel()
            different = a != b
            differ += int(different.sum())
            if different.any():
                step = torch.finfo(a.dtype).eps * torch.maximum(a.float().abs(), b.float().abs())
                apart = max(apart, round(((a.float() - b.float()).abs() / step)[different].max().item()))
    return values, differ, apart


def show(result: dict[str, Any]) -> None:
    mib = 1 << 20
    sizes = {
        name: f"{result[name] / mib:.0f} MiB" for name in ("checkpoint", "largest_shard", "largest_layer", "adapter")
    }
    print(", ".join(f"{name.replace('_', ' ')} {size}" for name, size in sizes.items()))
    for name, way in result["ways"].items():
        print(
            f"{name:<17} peak {way['peak'] / mib:>6.0f} MiB  {way['of_shard_and_layer']:>6.3f} of shard and layer  "
            f"{way['of_checkpoint']:>6.3f} of the checkpoint  {way['seconds']:>6.1f} s"
        )
    print(f"{result['values_that_differ']} of {result['values']} values differ")


if __name__ == "__main__":
    sys.exit(main())
