"""How fast is a training step of a short sequence, with and without the graphs of `train_fast`, and is it the same?

python benchmarks/training/short_steps.py --shape E4B --sequences 256,512,1024,2048 --json FILE.json
    [--where gpu] [--bits 512] [--steps 8] [--seconds 150]

QLoRA of rank 16 on every linear layer of the decoder, random weights in the real shape, 4-bit with double
quantization, bf16 autocast, a loss in chunks, AdamW, one process, one sequence a step. Ways, in turns:

plain       checkpointing without reentry
fast        the same with graphs
unchecked   no checkpointing, no graphs
windows     checkpointing, and `windows=True, products=True`
pieces      the same with `mlp=True`

The last two also as fast-windows and fast-pieces. Each runs twice. For each sequence and way: seconds of steps after
the first six, in which `train_fast` captures; tokens a second; PyTorch's peaks; the losses; and what the GPU has taken
beside PyTorch's memory.

`--bits N`: one step of N tokens from the same weights, as deterministic as PyTorch has it (attention of wide heads is
not): is the loss of "fast" that of "plain", how many of the gradients are, and how far are the others, of the norm of
them all? "again" repeats "plain".

What is not started within `--seconds` is left out; the file is written after every measurement. Exit code 1: something
raised, a loss is not finite, the first loss with `train_fast` is not that without, or nothing was replayed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import statistics
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for --bits; read when CUDA starts
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gemma4_compat
from benchmarks import common
from benchmarks.common import Data
from benchmarks.decoding import models
from benchmarks.small_card import device
from benchmarks.training import long_steps
from gemma4_compat._graphs import recording
from gemma4_compat._lab.stand_ins.tape import standing_in

WAYS = {
    "plain": long_steps.WAYS["chunked"],
    "fast": long_steps.WAYS["chunked"],
    "unchecked": long_steps.WAYS["chunked"],
    "windows": long_steps.Way(windows=True),
    "fast-windows": long_steps.Way(windows=True),
    "fast-whole": long_steps.Way(windows=True, products=False),
    "pieces": long_steps.WAYS["windows"],
    "fast-pieces": long_steps.WAYS["windows"],
}
TURNS = 2
#: Steps that are not timed: the graphs are captured in the fourth.
SETTLED = 6
MAX_TOKENS = 1 << 20  # of `train_fast`


@contextlib.contextmanager
def switched(steps: long_steps.Steps, way: str) -> Iterator[None]:
    """Inside, steps run this way, from the adapter of the beginning."""
    graphs: Data = {"graphs": True, "max_tokens": MAX_TOKENS} if is_fast(way) else {}
    with steps.switched(WAYS[way], **graphs):
        if way == "unchecked":
            steps.model.gradient_checkpointing_disable()
        try:
            yield
        finally:
            gemma4_compat.train_fast(steps.model, enabled=False)


def is_fast(way: str) -> bool:
    return way.startswith("fast")


def without(way: str) -> str:
    """The way that differs in `train_fast` only."""
    return "plain" if way == "fast" else way.removeprefix("fast-")


def measured(steps: long_steps.Steps, way: str, batches: Iterable[Data], timed: int) -> Data:
    """Times, peaks and losses of one turn. The batches are taken round and round."""
    import torch

    with switched(steps, way):
        optimizer = torch.optim.AdamW(list(steps.trained.values()), lr=1e-4)
        device.forget_peak()
        before = beside()
        seconds, losses = steps.timed(optimizer, itertools.islice(itertools.cycle(batches), SETTLED + timed))
        counted = gemma4_compat.statistics(steps.model).training
        found: Data = {"seconds": seconds[SETTLED:], "losses": losses, "memory": device.memory()}
        found["beside_gib"] = None if before is None else (beside() or 0.0) - before
        if is_fast(way):
            found |= {"replayed": counted.replayed, "captured": counted.captured, "reasons": counted.reasons}
            found |= {"capture_s": counted.capture_seconds, "fused": counted.fused, "not_fused": counted.not_fused}
        return found


def beside() -> float | None:
    """GiB of the GPU that PyTorch's allocator does not hold; None without one."""
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return float((total - free - torch.cuda.memory_reserved()) / long_steps.GIB)


def bits(steps: long_steps.Steps, sequence: int) -> Data:
    """How a step with each way compares with a plain one."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    found = {}
    for way in ("plain", "again", "fast"):
        with switched(steps, "plain" if way == "again" else way):
            for _ in range(5 if way == "fast" else 1):
                for weight in steps.trained.values():
                    weight.grad = None
                loss = steps.loss(steps.text(sequence))
            found[way] = loss.cpu(), {name: weight.grad.cpu() for name, weight in steps.sorted()}
    torch.use_deterministic_algorithms(False)
    return {way: long_steps.against(found["plain"], found[way]) for way in ("again", "fast")}


def all_turns(run: long_steps.Run, steps: long_steps.Steps, sequence: int, timed: int) -> None:
    """Measure one length in every way, in turns, and keep what was found."""
    batch = steps.text(sequence)
    for turn in range(TURNS):
        for way in run.arguments.ways:
            title = f"{sequence} {way} {turn + 1}"
            found = run.attempt(title, 0, lambda way=way: measured(steps, way, [batch], timed))
            if found is None:
                run.keep(f"{title}: {run.result['out'].get(title, 'not measured')}")
                continue
            median = statistics.median(found["seconds"])
            run.result["cells"][title] = found | {"sequence": sequence, "way": way, "turn": turn + 1}
            peak = found["memory"]["peak_gib"]
            more = f", captured in {found['capture_s']:.1f} s" if is_fast(way) else ""
            run.keep(f"{title}: {sequence / median:.0f} tokens a second, {median * 1e3:.0f} ms, {peak} GiB{more}")


def problems(cells: Data) -> Iterator[str]:
    """What must not be."""
    first: dict[tuple[int, str], str] = {}
    for title, cell in cells.items():
        if not all(math.isfinite(float(loss)) for loss in cell["losses"]):
            yield f"{title}: a loss is not finite"
        loss = cell["losses"][0]
        if not is_fast(cell["way"]):
            first.setdefault((cell["sequence"], cell["way"]), loss)
        elif not cell["replayed"]:
            yield f"{title}: nothing was replayed"
        elif loss != first.get((cell["sequence"], without(cell["way"])), loss):
            yield f"{title}: another loss"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True, choices=sorted(models.SHAPES))
    parser.add_argument("--where", default="gpu", help=f"of {', '.join(models.WHERE)}")
    parser.add_argument("--sequences", default="256,512,1024,2048", help="tokens of a sequence")
    parser.add_argument("--ways", default="plain,fast,unchecked", help=f"of {', '.join(WAYS)}")
    parser.add_argument("--bits", type=int, help="compare loss and gradients of steps of so many tokens")
    parser.add_argument("--steps", type=int, default=8, help="that are timed in a turn (8)")
    parser.add_argument("--rank", type=int, default=long_steps.RANK)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--json", type=Path, dest="out", help="write the result here")
    arguments = parser.parse_args(argv)
    common.chosen(parser, arguments, "ways", WAYS)
    run = long_steps.Run(arguments)
    run.result |= common.header(Path(__file__), sys.modules[__name__], arguments.shape, common.shown(arguments))
    work = models.work_folder(arguments.shape)
    with common.temporary("short-steps-", work) as folder:
        base, loaded = long_steps.load(arguments.shape, arguments.where, folder)
        run.result |= loaded
        steps = long_steps.Steps(base, rank=arguments.rank, tokens=None)
        run.keep(f"loaded in {loaded['load_s']:.0f} s")
        with standing_in(recording.RECORDERS):  # without a GPU
            if arguments.bits:
                run.result["bits"] = run.attempt("bits", 0, lambda: bits(steps, arguments.bits)) or {}
                run.keep(f"bits of {arguments.bits} tokens: {run.result['bits']}")
            for sequence in [int(number) for number in arguments.sequences.split(",") if number]:
                all_turns(run, steps, sequence, arguments.steps)
    run.result["problems"] += problems(run.result["cells"])
    run.keep("done")
    return common.ended(run.result)


if __name__ == "__main__":
    sys.exit(main())
