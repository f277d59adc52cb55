"""What does the lock of a split model cost where only one thread calls it: a forward of one token, the shortest there
is, with the lock against the same without it?

python benchmarks/shim/model_lock.py --shape E2B|E4B|tiny --out FILE.json [--minutes N] [--rounds N]

Random weights in the real shape (no network), table, towers and every decoder layer offloaded, in 4-bit and in bf16.
One process has the model and takes the lock out and puts it back between blocks of forwards, in turns (with, without,
without, with, then the other way round). A cost is the ratio of with to without in one round; next to it stand the
ratios of with to with and of without to without, which are nothing but noise. A cost is called indistinguishable from
zero where its median is no further from 1 than the 95 % intervals of these reach.

And exactly: the Python and C functions called in such a forward, counted by ``sys.setprofile``, with and without. They
are the same on every machine.

`--shape tiny` runs without a GPU, too, and offloads to disk there. On a busy machine measure `--clock processor`: the
time of the thread, without what others take.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common
from benchmarks.common import Data
from benchmarks.shim import idle_shim
from benchmarks.small_card import cases as small_card_cases
from benchmarks.small_card import device as small_card_device
from benchmarks.small_card import models as small_card_models

FORWARDS = 10
ROUNDS = 200
CASES = {
    "4-bit": small_card_cases.CASES["everything"],
    "bf16": small_card_cases.Case("ours", "the same, layers in bf16", small_card_cases.EVERYTHING),
}
#: Blocks of one round; those with a capital letter have the lock.
BLOCKS = ("A1", "b1", "b2", "A2")
PAIRS = {"cost": (("A1", "b1"), ("A2", "b2")), "with": (("A1", "A2"),), "without": (("b1", "b2"),)}
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.thread_time}


@contextlib.contextmanager
def unlocked(model: Any) -> Iterator[None]:
    """The model without its lock."""
    from gemma4_compat._offload import model_lock

    known = {module: lock for module in model.modules() if (lock := model_lock.of(module)) is not None}
    for module in known:
        model_lock.release(module)
    yield
    for module, lock in known.items():
        model_lock.guard(module, lock)


def block(forward: Callable[[], Any], clock: Callable[[], float]) -> float:
    """Milliseconds of one of some forwards: their median."""
    found = []
    for _ in range(FORWARDS):
        started = clock()
        forward()
        small_card_device.synchronize()
        found.append(1000 * (clock() - started))
    return statistics.median(found)


def turn(model: Any, forward: Callable[[], Any], clock: Callable[[], float], order: tuple[str, ...]) -> Data:
    found: Data = {}
    for name in order:
        with contextlib.nullcontext() if name.isupper() else unlocked(model):
            forward()
            found[name] = block(forward, clock)
    return found


def counted(model: Any, forward: Callable[[], Any]) -> Data:
    """The functions that a forward calls, with the lock and without, and those that differ."""
    own, other = idle_shim.calls(forward), None
    with unlocked(model):
        forward()
        other = idle_shim.calls(forward)
    names = sorted({*own[0], *own[1], *other[0], *other[1]})
    both = {name: [side[0][name] + side[1][name] for side in (own, other)] for name in names}
    with_lock, without = (sum(pair[side] for pair in both.values()) for side in (0, 1))
    return {
        "with": with_lock,
        "without": without,
        "more": with_lock / without - 1,
        "differing": {name: pair for name, pair in both.items() if pair[0] != pair[1]},
    }


def costs(rounds: list[Data]) -> Data:
    ratios = {
        kind: common.spread([entry[own] / entry[other] for entry in rounds for own, other in pairs])
        for kind, pairs in PAIRS.items()
    }
    noise = max(abs(end - 1) for kind in ("with", "without") for end in ratios[kind]["interval_95"])
    cost = ratios["cost"]["median"] - 1
    return {
        "ms_without": statistics.median([entry[name] for entry in rounds for name in ("b1", "b2")]),
        "overhead": cost,
        "noise": noise,
        "indistinguishable_from_zero": abs(cost) <= noise,
        "ratios": ratios,
    }


def measure(model: Any, clock: str, rounds: int, until: float) -> Data:
    """One case."""
    import torch

    from gemma4_compat._offload import model_lock
    from gemma4_compat._offload.transfer import streaming

    ids = small_card_models.prompt(model, 1)

    def forward() -> Any:
        with torch.no_grad():
            return model(input_ids=ids, use_cache=False)

    for _ in range(3):
        forward()
    entry: Data = {
        "hooks": sum(model_lock.of(module) is not None for module in model.modules()),
        "streamed_layers": sum(streaming.is_streamed(module) for module in model.modules()),
        "calls": counted(model, forward),
        "rounds": [],
    }
    longest = 0.0
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            began = time.monotonic()
            if number and began + longest > until:
                break
            entry["rounds"].append(turn(model, forward, CLOCKS[clock], BLOCKS if number % 2 == 0 else BLOCKS[::-1]))
            longest = max(longest, time.monotonic() - began)
    finally:
        gc.enable()
    return entry | {"cost": costs(entry["rounds"])}


def text(name: str, entry: Data) -> str:
    cost, calls = entry["cost"], entry["calls"]
    low, high = cost["ratios"]["cost"]["interval_95"]
    return (
        f"{name:<6} {cost['ms_without']:.3f} ms, {100 * cost['overhead']:+.2f} % "
        f"({100 * (low - 1):+.2f} to {100 * (high - 1):+.2f}; noise {100 * cost['noise']:.2f}), "
        f"calls {calls['without']} {calls['with'] - calls['without']:+}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__, sorted(small_card_cases.SHAPES), minutes=2.0)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of each model (default: {ROUNDS})")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    arguments = parser.parse_args(argv)
    if arguments.shape is None:
        parser.error("--shape is required")
    deadline = time.monotonic() + 60 * arguments.minutes
    module = sys.modules[__name__]
    result = common.header(Path(__file__), module, arguments.shape, common.shown(arguments), arguments.note)
    result |= {"settings": {"forwards": FORWARDS, "clock": arguments.clock, "pairs": PAIRS}, "models": {}}
    work_folder = arguments.work or small_card_models.work_folder(arguments.shape)
    with common.temporary("model-lock-", work_folder) as work:
        result |= small_card_models.build(arguments.shape, work)
        for number, (name, case) in enumerate(CASES.items()):
            until = time.monotonic() + (deadline - time.monotonic()) / (len(CASES) - number)
            model = small_card_models.load(arguments.shape, case, work)
            entry = {"what": case.what, **measure(model, arguments.clock, arguments.rounds, until)}
            result["models"][name] = entry
            if len(entry["rounds"]) < arguments.rounds:
                missing = arguments.rounds - len(entry["rounds"])
                result["not_run"].append(f"{name}: {missing} of {arguments.rounds} rounds")
            common.write(result, arguments.out)
            print(text(name, entry), flush=True)
            del model
    return 0


if __name__ == "__main__":
    sys.exit(main())
