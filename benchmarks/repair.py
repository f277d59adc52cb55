"""How much host memory and time does a repair take, against reading the checkpoint once and writing it once?

python benchmarks/repair.py [--shape E2B|tiny] [--work FOLDER] [--rounds 3] [--json FILE]

A random checkpoint (E2B: its layers and vocabulary, with a quarter of the rows of its per-layer embeddings, bf16) with
keys and values of KV-shared layers, and one without. `gemma4_compat.repair_checkpoint`, and a copy of the second one's
files with the same buffer and the same `fsync`, each in processes of their own, by turns. Memory is the peak resident
set minus what the imports had taken. Takes four times the checkpoint on disk, removed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[:2]]

import common  # noqa: E402

WAYS = ("repair", "copy")
PIECE = 64 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("E2B", "tiny"), default="E2B")
    parser.add_argument("--work", type=Path, help="folder for the checkpoints (default: a temporary one)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the result here too")
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        what, folder = arguments.child[0], Path(arguments.child[1])
        print("\n" + json.dumps(build(arguments.shape, folder) if what == "build" else measured(what, folder)))
        return 0
    with tempfile.TemporaryDirectory(prefix="repair-", dir=arguments.work) as work:
        result = run(arguments.shape, Path(work), arguments.rounds)
    print(json.dumps(result, indent=1))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def run(shape: str, work: Path, rounds: int) -> dict[str, Any]:
    # Not here: a child's peak begins with what its parent holds.
    built = common.child(Path(__file__), shape, "build", work)
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            found[way].append(common.child(Path(__file__), shape, way, work))
    ways = {
        way: {
            "seconds": [item["seconds"] for item in items],
            "median_seconds": statistics.median(item["seconds"] for item in items),
            "peak": max(item["peak"] for item in items),
        }
        for way, items in found.items()
    }
    return {
        "question": "peak host memory and time of a repair, against reading and writing the checkpoint once",
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "shape": shape,
        **built,
        "ways": ways,
        "of_copy": round(ways["repair"]["median_seconds"] / ways["copy"]["median_seconds"], 2),
    }


def build(shape: str, work: Path) -> dict[str, Any]:
    """Write both checkpoints."""
    import torch
    from accelerate import init_empty_weights
    from transformers import Gemma4ForConditionalGeneration

    from gemma4_compat._checkpoint import shards
    from gemma4_compat._models import shared_weights, variants
    from gemma4_compat._reproduction import tiny_configs

    config = tiny_configs.config(variant="E2B") if shape == "tiny" else variants.config("E2B")
    if shape != "tiny":
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
    nbytes = sum(entry.nbytes for entry in shards.checkpoint(work / "saved").values())
    return {"checkpoint": nbytes, "lost_tensors": len(whole) - len(sizes)}


def measured(way: str, work: Path) -> dict[str, Any]:
    import resource

    import torch

    import gemma4_compat

    torch.set_num_threads(1)
    out = work / "out"
    unit = 1 if sys.platform == "darwin" else 1024
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    if way == "repair":
        report = gemma4_compat.repair_checkpoint(work / "saved", work / "original", out, progress=False)
        assert report.tensors
    else:
        copy(work / "saved", out)
    seconds = time.perf_counter() - began
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit
    shutil.rmtree(out)
    return {"seconds": round(seconds, 2), "peak": peak}


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
