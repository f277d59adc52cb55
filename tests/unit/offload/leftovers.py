"""What deleted split models leave behind: ``python -m tests.unit.offload.leftovers --loads 20 --jobs 6 --out
FILE.json``.

A model is split, generates, and takes a training step of its adapter; then it is deleted. Exit status 0: nothing of
it is there any more.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import collections
import gc
import itertools
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.unit.offload import threads

KINDS = ("ModuleGroup", "LayerStreamer", "CopyStream", "ModelLock", "Bypass", "HookedForward", "Lookup", "Stored",
         "Pinned", "OffloadedWeight", "AlignDevicesHook", "PeftModel", "Gemma4ForConditionalGeneration")  # fmt: skip


_PACKAGES = ("gemma4_compat", "accelerate", "peft", "transformers", "bitsandbytes")


def use(workspace: Any, store: str, quantization: str | None) -> None:
    """Load, split, generate, train, and forget a model."""
    import torch
    from peft import PeftModel

    base = threads.split(workspace, store, quantization)
    model = PeftModel.from_pretrained(base, workspace.adapter("language"), is_trainable=True)
    batch = workspace.inputs()
    model.generate(**batch, max_new_tokens=3, do_sample=False)
    weights = [weight for weight in model.parameters() if weight.requires_grad and weight.device.type != "meta"]
    optimizer = torch.optim.AdamW(weights, lr=1e-3)
    model.train()(**batch, labels=batch["input_ids"]).loss.backward()
    optimizer.step()
    with torch.no_grad():
        model.eval()(**batch)


def now(folder: Path) -> dict[str, Any]:
    """What is alive in this process, and what of ``folder`` it has open or mapped."""
    import torch

    from gemma4_compat._engine.runtime import locks
    from gemma4_compat._gemma4.accelerate import attached
    from gemma4_compat._offload import host_memory

    for _ in range(2):
        gc.collect()
    kinds = (type(item) for item in gc.get_objects())
    objects = collections.Counter(
        kind.__name__ for kind in kinds if str(kind.__module__).partition(".")[0] in _PACKAGES
    )
    maps = Path("/proc/self/maps").read_text(encoding="utf-8") if sys.platform == "linux" else ""
    files = list(Path("/proc/self/fd").iterdir()) if sys.platform == "linux" else []
    found = {kind: objects[kind] for kind in KINDS}
    found |= {
        "tensors": sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects()),
        "files mapped": sum(str(folder) in line for line in maps.splitlines()),
        "files open": len(files),
        "pinned": len(host_memory._registered),
        "hooks": sum(len(kind._handles) for kind in (attached.STREAMING, attached.IDLE, attached.LOADING_HOOKS)),
        "locks": len(locks._locks),
        "threads": threading.active_count(),
    }
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        found["bytes on the GPU"] = torch.cuda.memory_allocated()
    return found


def resident() -> int:
    """KiB of this process in memory."""
    text = Path("/proc/self/status").read_text(encoding="utf-8") if sys.platform == "linux" else "VmRSS: 0 kB"
    return int(next(line for line in text.splitlines() if line.startswith("VmRSS")).split()[1])


def check(workspace: Any, store: str, quantization: str | None, loads: int) -> dict[str, Any]:
    """What is left after ``loads`` models: more than after the first one, which imports and caches; and objects of
    :data:`KINDS` and mapped files that were not there before any.
    """
    first = now(workspace.folder)
    use(workspace, store, quantization)
    before = now(workspace.folder)
    sizes = [resident()]
    for _ in range(loads - 1):
        use(workspace, store, quantization)
        gc.collect()
        sizes.append(resident())
    after = now(workspace.folder)
    left = {name: [before[name], count] for name, count in after.items() if count > before[name]}
    alive = {kind: after[kind] - first[kind] for kind in KINDS if after[kind] > first[kind]}
    mapped = after["files mapped"] - first["files mapped"]  # another test may keep a model of this folder
    return {"left": left, "alive": alive, "files mapped": mapped, "resident KiB": sizes}


def measure(cells: list[tuple[str, str | None, int]], folder: Path) -> Iterator[dict[str, Any]]:
    """What a process does: :func:`check` for each (store, quantization, loads)."""
    import gemma4_compat  # noqa: F401  (armed before the libraries)
    from gemma4_compat._lab.workspace import Workspace
    from tests.generated.search import run

    with run.quiet(), tempfile.TemporaryDirectory(dir=folder) as place:
        workspace = Workspace.build(Path(place))
        for cell in cells:
            yield check(workspace, *cell)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loads", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--limit", type=float, default=900, help="seconds for a combination")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()

    from tests.generated.search import pool

    asked = [(*cell, chosen.loads) for cell in itertools.product(threads.STORES, threads.QUANTIZATIONS)]
    found = {}
    for cell, result in pool.spread(measure, [[cell] for cell in asked], jobs=chosen.jobs, limit=chosen.limit):
        if isinstance(result, pool.Died):
            result = {"died": result.reason, "log": result.detail}
        found[cell] = result
        print(*cell, result, flush=True)
    if chosen.out:
        measured = {f"{cell[0]}, {cell[1] or 'bf16'}": found[cell] for cell in asked}
        threads.write(chosen.out, {"loads": chosen.loads}, measured)
    return int(any("died" in each or each["left"] or each["alive"] or each["files mapped"] for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
