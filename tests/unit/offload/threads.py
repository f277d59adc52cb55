"""Several threads call one split model: ``python -m tests.unit.offload.threads --forwards 1000 --jobs 12 --out
FILE.json``.

Every combination of where the weights are (disk, host memory), their quantization, and no adapter or a LoRA adapter on
the language model. Every layer, the towers and every embedding are offloaded. Each answer must be that of one device,
bit by bit. Exit status 0: they all were. Each combination has a process of its own, ``--jobs`` of them at a time.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import contextlib
import itertools
import json
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STORES = ("disk", "ram")
QUANTIZATIONS = (None, "4bit-double", "8bit")
ADAPTERS = (None, "language")
EMBEDDINGS = ("model.language_model.embed_tokens", "model.language_model.embed_tokens_per_layer", "lm_head")


def split(workspace: Any, store: str, quantization: str | None = None, adapter: str | None = None) -> Any:
    """Every layer, tower and embedding off the main device; "ram" is the code of ``"cpu"`` entries on a GPU."""
    import torch
    from accelerate import dispatch_model

    from gemma4_compat._lab import tiny

    model = workspace.load(quantization)
    main, offloaded = torch.device(workspace.main), "disk" if store == "disk" else "cpu"
    placement = tiny.device_map(model, "both", main=main, offloaded=offloaded)
    placement |= {name: offloaded for name in placement if ".layers." in name or name in EMBEDDINGS}
    skip = tiny.skip_keys(model)
    folder = tempfile.mkdtemp(prefix="offload-", dir=workspace.folder)
    model = dispatch_model(model, placement, main_device=main, offload_dir=folder, skip_keys=skip)
    return adapted(workspace, model, adapter)


def adapted(workspace: Any, model: Any, adapter: str | None) -> Any:
    if adapter is None:
        return model
    from peft import PeftModel

    return PeftModel.from_pretrained(model, workspace.adapter(adapter))


def prompts(workspace: Any) -> list[dict[str, Any]]:
    """Text, a batch, and text with an image and sound."""
    import torch

    chance = torch.Generator().manual_seed(3)
    texts = [torch.randint(3, 240, shape, generator=chance).to(workspace.main) for shape in ((1, 9), (3, 14))]
    return [*({"input_ids": text} for text in texts), workspace.inputs()]


def answers(model: Any, prompts: list[dict[str, Any]]) -> list[Any]:
    import torch

    with torch.no_grad():
        return [model(**prompt).logits for prompt in prompts]


def run_together(works: list[Callable[[], Any]], *, limit: float = 300) -> list[BaseException | None]:
    """Run functions in threads, switched as often as Python can; what each raised.

    Raises:
        TimeoutError: some have not ended within ``limit`` seconds.
    """
    raised: list[BaseException | None] = [None] * len(works)
    start = threading.Barrier(len(works))

    def run(index: int, work: Callable[[], Any]) -> None:
        start.wait()
        try:
            work()
        except BaseException as error:  # noqa: BLE001 (each is reported)
            raised[index] = error

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(works)]
    with often_switched():
        for thread in threads:
            thread.start()
        until = time.monotonic() + limit
        for thread in threads:
            thread.join(max(until - time.monotonic(), 0.1))
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"{sum(thread.is_alive() for thread in threads)} of {len(threads)} threads have not ended")
    return raised


@contextlib.contextmanager
def often_switched() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def check(
    model: Any, prompts: list[dict[str, Any]], expected: list[Any], *, forwards: int, threads: int, limit: float = 300
) -> dict[str, Any]:
    """How many of ``forwards`` forwards from several threads were exact, and what was raised."""
    import torch

    numbers, exact = itertools.count(), [0] * threads

    def work(index: int) -> None:
        with torch.no_grad():
            while (number := next(numbers)) < forwards:
                chosen = number % len(prompts)
                exact[index] += torch.equal(model(**prompts[chosen]).logits, expected[chosen])

    begun = time.perf_counter()
    raised = run_together([lambda index=index: work(index) for index in range(threads)], limit=limit)
    return {
        "exact": sum(exact),
        "by_thread": exact,
        "raised": [f"{type(error).__name__}: {error}" for error in raised if error is not None],
        "seconds": round(time.perf_counter() - begun, 1),
    }


@dataclass(frozen=True)
class Cell:
    """One combination, and how long it is run."""

    store: str
    quantization: str | None
    adapter: str | None
    forwards: int
    threads: int
    limit: float

    @property
    def name(self) -> str:
        return f"{self.store}, {self.quantization or 'bf16'}, {'LoRA' if self.adapter else 'no adapter'}"


def measure(cells: list[Cell], folder: Path) -> Iterator[dict[str, Any]]:
    """What a process does: :func:`check` for each cell."""
    import gemma4_compat  # noqa: F401  (armed before the libraries)
    from gemma4_compat._lab.workspace import Workspace
    from tests.generated.search import run

    with run.quiet(), tempfile.TemporaryDirectory(dir=folder) as place:
        workspace = Workspace.build(Path(place))
        given = prompts(workspace)
        for cell in cells:
            expected = answers(adapted(workspace, workspace.load(cell.quantization), cell.adapter), given)
            model = split(workspace, cell.store, cell.quantization, cell.adapter)
            yield check(model, given, expected, forwards=cell.forwards, threads=cell.threads, limit=cell.limit)


def cells() -> list[tuple[str, str | None, str | None]]:
    return list(itertools.product(STORES, QUANTIZATIONS, ADAPTERS))


def write(file: Path, given: dict[str, Any], measured: dict[str, Any]) -> None:
    """What was measured, on which stack."""
    import gemma4_compat
    from gemma4_compat._doctor.reproductions import findings

    stack = {"gemma4_compat": gemma4_compat.__version__, "python": platform.python_version()}
    result = {**stack, "versions": findings.stack(), **given, "measured": measured}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--forwards", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--limit", type=float, default=900, help="seconds for a combination")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()

    from tests.generated.search import pool

    asked = [Cell(*cell, chosen.forwards, chosen.threads, chosen.limit) for cell in cells()]
    found = {}
    for cell, result in pool.spread(measure, [[cell] for cell in asked], jobs=chosen.jobs, limit=chosen.limit + 60):
        if isinstance(result, pool.Died):
            result = {"exact": 0, "by_thread": [], "raised": [result.reason], "seconds": None, "log": result.detail}
        found[cell] = result
        print(f"{cell.name}: {result}", flush=True)
    if chosen.out:
        given = {"forwards": chosen.forwards, "threads": chosen.threads}
        write(chosen.out, given, {cell.name: found[cell] for cell in asked})
    return int(any(result["exact"] != chosen.forwards for result in found.values()))


if __name__ == "__main__":
    sys.exit(main())
