"""How long does a replayed decoding step take on a card with fewer SMs, and is that what `plan` models?

python benchmarks/decoding/multiprocessors.py --shape E2B --out FILE.json [--counts 132,64,32,16] [--rounds N]
    [--ways before,own]
python benchmarks/decoding/multiprocessors.py --fit

Random weights in the real shape, 4-bit with double quantization, everything on the card, batch 1, greedy, a static
cache; with a LoRA adapter, too, on the first count and the last. Each count of SMs has a process of its
own, whose work a CUDA green context (torch 2.9) keeps on so many: kernels, graphs, caches and clocks are the card's
own, its memory is as fast as so many can read it, which is measured beside it. The first count should be all of them.

With `--ways` those of depth.py take turns; the last one's figures are those of the case.

A graph that is replayed has to stay inside the context; a matrix product, captured, shows whether it does.

`--fit` finds the constants of the planner's model of decode time (`gemma4_compat/_plan/speed.py`) by least squares
of relative errors over committed results (multiprocessors_fit.py names them), and says how far
each is from it.

The file is written after every step. Exit code 1: something raised, or a context did not bound a graph.
`--shape tiny` runs on a CPU, without bounds, and says nothing of speed.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common
from benchmarks.common import Data, Order
from benchmarks.decoding import (
    depth_measure,
    measure,
    models,
)
from benchmarks.small_card.models import PROMPT

TOKENS = 100
TURN: Order = {"way": "replayed", "tokens": TOKENS, "settled": 5}
#: A product takes all SMs, so it slows down as they get fewer; to this share of it at least.
BOUNDED = 0.75
LIMIT_S = 100

_context: Any = None


# In a worker


def bound(order: Order) -> Data:
    """Keep what this process computes on so many SMs; how fast they read, write and multiply."""
    global _context
    import torch

    if not torch.cuda.is_available():
        return {}
    torch.cuda.init()
    everything = torch.cuda.get_device_properties(0).multi_processor_count
    if order["count"] < everything:
        from torch.cuda.green_contexts import GreenContext

        from gemma4_compat._kernels.specs import nf4_gemv

        # Before any stream exists: those that PyTorch hands out belong to the context that is current then.
        _context = GreenContext.create(num_sms=order["count"], device_id=0)
        _context.set_context()
        nf4_gemv.multiprocessors = lambda _device: order["count"]  # the device still has all of them
    return {"of": everything, "gb_s": _read(), "product_s": _product(), "clock_mhz": _clock()}


def _timed(action: Callable[[], Any], runs: int = 10) -> float:
    """Seconds on the device, of one of so many runs."""
    import torch

    for _ in range(3):
        action()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(runs):
        action()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / runs


def _read() -> float:
    """GB/s (1e9) that a product of a matrix of 1 GiB and a vector reads."""
    import torch

    table = torch.ones(1 << 15, 1 << 14, dtype=torch.bfloat16, device="cuda")
    taken = _timed(lambda: torch.mv(table, table[0]))
    return table.numel() * 2 / taken / 1e9


def _product() -> float:
    """Seconds of a product of 4,096 x 4,096 in bf16, replayed from a graph."""
    import torch

    one = torch.ones(4096, 4096, dtype=torch.bfloat16, device="cuda")
    torch.mm(one, one)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.mm(one, one)
    return _timed(graph.replay)


def _clock() -> float | None:
    """The highest clock of the SMs, in MHz."""
    query = ["nvidia-smi", "--query-gpu=clocks.max.sm", "--format=csv,noheader,nounits"]
    said = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20).stdout.split()
    return float(said[0]) if said else None


def parts(order: Order) -> Data:
    """What a token reads and computes, as the planner counts it."""
    from gemma4_compat._memory import blueprint
    from gemma4_compat._plan import speed

    found = speed.work(blueprint.describe(models.base(measure.model())), context=PROMPT + TOKENS)
    return {"work": found.as_data()}


def turn(order: Order) -> Data:
    """One call, in the way that is asked for, if one is."""
    way = order.get("arithmetic")
    with depth_measure.using(way) if way else contextlib.nullcontext():
        return measure.turn(order)


ACTIONS: dict[str, Callable[[Order], Data]] = {
    "bound": bound,
    "build": measure.build,
    "load": measure.load,
    "adapt": measure.adapt,
    "parts": parts,
    "turn": turn,
}


# The parent


class Stopped(Exception):  # noqa: N818 (it is no error: it is kept in the result)
    """Nothing more can be done in this process."""


def measured(arguments: Any, options: list[str], deadline: float) -> Data:
    result = common.header(Path(__file__), sys.modules[__name__], arguments.shape, options, arguments.note)
    result["counts"] = {}
    folder = arguments.work or models.work_folder(arguments.shape)
    cases = [(count, "gpu") for count in arguments.counts] + [(arguments.counts[0], "host")] * arguments.host
    ends = (arguments.counts[0], arguments.counts[-1])
    with common.temporary("multiprocessors-", folder) as work, common.workers(Path(__file__), work) as start:
        order = {"shape": arguments.shape, "folder": str(work), "tokens": {"replayed": TOKENS}}

        def tell(worker: common.Worker, name: str, do: str, **more: Any) -> Data:
            left = deadline - time.monotonic()
            if left <= 0:
                result["not_run"].append(name)
                raise Stopped
            found = worker({**order, "do": do, **more}, timeout=min(left, LIMIT_S))
            if error := found.pop("error"):
                out_of_time = error.startswith("no end after") and left < LIMIT_S
                result["not_run" if out_of_time else "problems"].append(
                    name if out_of_time else f"{name}, {do}: {error}"
                )
                raise Stopped
            return found

        # Importing takes longer than most steps: all of them do it now, one at a time works after that.
        builder, *others = (
            start(True, HF_DEACTIVATE_ASYNC_LOAD="1")  # threads of its own would not be in the context
            for _ in range(1 + len(cases))
        )
        try:
            result.update(tell(builder, "build", "build"))
        except Stopped:
            return result
        builder.close()
        for worker in others:
            worker.wait()
        for (count, where), worker in zip(cases, others):
            found = result["counts"].setdefault(str(count), {})
            name = f"{count} multiprocessors, {where}"
            with contextlib.suppress(Stopped):
                bounds = tell(worker, name, "bound", count=count)
                tell(worker, name, "load", where=where)
                work = tell(worker, name, "parts")["work"]
                for case in (where, f"{where}+lora") if count in ends else (where,):
                    if case != where:
                        tell(worker, name, "adapt", where=where)
                        work["adapted"] = work["layers"]
                    entry = bounds | {"work": dict(work)}
                    ways = [{"arithmetic": way} for way in arguments.ways] or [{}]
                    turns = [
                        [tell(worker, name, "turn", **TURN, **way)["tok_s"] for way in ways]
                        for _ in range(1 + arguments.rounds)  # the first captures
                    ]
                    *before, last = zip(*turns[1:], strict=True)
                    found[case] = entry | {"rounds": list(last), "summary": common.spread(last)}
                    for way, rates in zip(arguments.ways, before):
                        found[case][way] = {"rounds": list(rates), "summary": common.spread(rates)}
                    common.write(result, arguments.out)
                    print(f"{name}: {case} {found[case]['summary']}, {entry.get('gb_s')} GB/s", flush=True)
            worker.close()
        check_bounds(result)
    return result


def check_bounds(result: Data) -> None:
    """Whether a captured product took as much longer as it has fewer SMs."""
    known = {
        int(count): entry["product_s"]
        for count, cases in result["counts"].items()
        for entry in cases.values()
        if "product_s" in entry
    }
    for count, taken in known.items():
        most = max(known)
        if taken < BOUNDED * known[most] * most / count:
            result["problems"].append(f"{count} multiprocessors did not bound a graph: {taken:.2e} s a product")


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__, sorted(models.SHAPES), minutes=3.0)
    parser.add_argument("--counts", default="132,64,32,16", help="of SMs (132,64,32,16)")
    parser.add_argument("--host", action="store_true", help="the first count with table and towers on the host, too")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each (4)")
    parser.add_argument("--ways", default="", help=f"of {', '.join(depth_measure.WAYS)}, in turns")
    parser.add_argument("--fit", action="store_true", help="find the planner's constants from committed results")
    arguments = parser.parse_args(argv)
    if arguments.child:
        return common.serve(ACTIONS)
    if arguments.fit:
        from benchmarks.decoding import multiprocessors_fit

        multiprocessors_fit.FIT.write_text(json.dumps(multiprocessors_fit.report(), indent=1) + "\n", encoding="utf-8")
        print(multiprocessors_fit.section())
        return 0
    if arguments.shape is None:
        parser.error("--shape is required")
    deadline = time.monotonic() + 60 * arguments.minutes
    options = common.shown(arguments)
    common.chosen(parser, arguments, "ways", depth_measure.WAYS)
    arguments.counts = [int(count) for count in arguments.counts.split(",")]
    result = measured(arguments, options, deadline)
    common.write(result, arguments.out)
    return common.ended(result)


if __name__ == "__main__":
    sys.exit(main())
