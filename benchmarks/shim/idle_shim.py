"""What does the shim cost where it has nothing to do: a forward and a decoded token of a model that is wholly on the
GPU, with every patch applied, against upstream as it is?

python benchmarks/shim/idle_shim.py --shape E2B|E4B --out FILE.json [--minutes N] [--blocks N]

Random weights in the real shape (no network): in bfloat16, and 4-bit with double quantization, without and with an
adapter on the language model and both towers. A CPU changes its speed within a process, and by more than a shim
costs, so both sides are timed in one process, a few tokens at a time: ``shim_switch`` takes the shim out and puts it
back within a millisecond. A turn is the end of a short generate and a prefill, each after some that are not timed; a
round is four turns, with, without, without, with (A1 B1 B2 A2), so that a machine that gets slower costs both sides
the same. The cost is sqrt(A1 A2 / (B1 B2)), its interval a bootstrap over the rounds; next to it stands sqrt(A1 B2 /
(B1 A2)), as many turns in which a cost cancels out, so that it is nothing but noise. A cost is called
indistinguishable from zero where its median is no further from 1 than the 95 % interval of the noise reaches; of
fewer than four rounds nothing is said.

And exactly: the Python and C functions called in a prefill and in a decoded token, counted by ``sys.setprofile``, and
the instructions of the interpreter, with the shim and without, and which functions differ. These counts are the same
on every machine of a Python release. Another process, which never had the shim, counts, too: where the one that was
switched off does not call exactly the same, that is a problem.

Exit code 1: a process raised, or switching left something. A cost is a result.

`--shape tiny` runs without a GPU, too, and so does `--shape tiny-36`, as narrow and with 36 layers. On a busy machine
measure `--clock processor`: the time of the thread, without what others take.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gemma4_compat
from benchmarks import common
from benchmarks.common import Data, Order
from benchmarks.shim import shim_switch
from benchmarks.small_card import cases as small_card_cases
from benchmarks.small_card import device as small_card_device
from benchmarks.small_card import models as small_card_models

#: Of the tokens that a generate decodes in a turn, and of the prefills, the first are not timed: what is called has
#: just been changed, and the interpreter looks it up anew.
TOKENS, UNTIMED = 10, 3
PREFILL = 512
PREFILLS = 2
BLOCKS = 60
#: With fewer there is no verdict.
ENOUGH = 4
#: How often calls are counted; the counts should be the same.
COUNTS = 3
LISTED = 40
MODELS = {
    "plain": "bfloat16, everything on one device",
    "base": "4-bit, everything on one device",
    "adapter": "the same with an adapter",
}
TURNS = {"A1": True, "B1": False, "B2": False, "A2": True}
#: Numerator and denominator of the cost and of what is nothing but noise; of two turns each, the geometric mean.
PAIRS = {"A/B": ("A1 A2", "B1 B2"), "noise": ("A1 B2", "B1 A2"), "A/A": ("A1", "A2"), "B/B": ("B1", "B2")}
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.thread_time}
#: Layers of the tiny shapes.
TINY = {"tiny": 6, "tiny-36": 36}


# In a worker

_model: Any = None
_switch: shim_switch.Switch | None = None


def build(order: Order) -> Data:
    """The checkpoint and the adapters."""
    shape = order["shape"]
    layers = {"layers": TINY[shape]} if shape in TINY else {}
    return small_card_models.build(_base(shape), Path(order["folder"]), everywhere=True, **layers)


def _base(shape: str) -> str:
    """What the shape is called elsewhere."""
    return "tiny" if shape in TINY else shape


def prepare(order: Order) -> Data:
    """Load a model, or put the adapter on it, and warm up."""
    global _model
    import torch
    from peft import PeftModel

    folder = Path(order["folder"])
    if order["model"] == "plain":
        from transformers import Gemma4ForConditionalGeneration

        place = {"": small_card_models.main_device()}
        _model = Gemma4ForConditionalGeneration.from_pretrained(
            folder / "checkpoint", dtype=torch.bfloat16, device_map=place
        ).eval()
    elif order["model"] == "base":
        _model = None  # not both at a time
        _model = small_card_models.load(_base(order["shape"]), small_card_cases.CASES["all-gpu"], folder)
    else:
        _model = PeftModel.from_pretrained(_model, folder / "adapter-linear").eval()
    states = Counter(str(status.state) for status in gemma4_compat.status().values())
    with torch.no_grad():
        small_card_models.generate(_model, 4)
        _prefill(order)
    return {"patches": dict(states), **small_card_device.memory()}


def _ids(order: Order) -> Any:
    return small_card_models.prompt(_model, 64 if order["shape"] in TINY else PREFILL)


def _prefill(order: Order) -> Any:
    return _model(input_ids=_ids(order), logits_to_keep=1)


def block(order: Order) -> Data:
    """A round: milliseconds of a token and of a prefill, the median of each turn."""
    import torch

    found: Data = {}
    switch = switched()
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad():
            for name, on in TURNS.items():
                switch.turn(on)
                found[name] = _turn(order)
    finally:
        switch.turn(True)
        gc.enable()
    return found


def _turn(order: Order) -> Data:
    now = CLOCKS[order["clock"]]
    _, clock = small_card_models.generate(_model, TOKENS, now)
    tokens = [1000 * (after - before) for before, after in itertools.pairwise(clock.times[1:])]
    prefills = []
    for _ in range(PREFILLS):
        small_card_device.synchronize()
        started = now()
        _prefill(order)
        small_card_device.synchronize()
        prefills.append(1000 * (now() - started))
    return {"token_ms": [statistics.median(tokens[UNTIMED:])], "prefill_ms": [statistics.median(prefills[1:])]}


def switched() -> shim_switch.Switch:
    """The switch of this process, which has the shim."""
    global _switch
    if _switch is None:
        _switch = shim_switch.Switch()
    return _switch


def count(order: Order) -> Data:
    """The functions that a prefill and a decoded token call, and the instructions; ``switched``: without the shim."""
    if not order.get("switched"):
        return _count(order)
    switched().turn(False)
    try:
        return _count(order)
    finally:
        switched().turn(True)


def _count(order: Order) -> Data:
    import torch

    found: Data = {}
    with torch.no_grad():
        state = _model(input_ids=small_card_models.prompt(_model, small_card_models.PROMPT), use_cache=True)
        last = state.logits[:, -1:].argmax(-1)

        def decode() -> None:
            _model(input_ids=last, past_key_values=state.past_key_values, use_cache=True)

        for name, action in (("prefill", lambda: _prefill(order)), ("token", decode)):
            action()
            runs = [calls(action) for _ in range(COUNTS)]
            found[name] = {
                "python": [sum(python.values()) for python, _ in runs],
                "c": [sum(c.values()) for _, c in runs],
                "instructions": [instructions(action) for _ in range(2)],
                "functions": {key: number for part in runs[-1] for key, number in part.items()},
            }
    return found


def instructions(action: Callable[[], Any]) -> int:
    """How many instructions the interpreter executes in ``action``, in this thread."""
    executed = 0

    def note(frame: Any, event: str, _argument: Any) -> Any:
        nonlocal executed
        if event == "call":
            frame.f_trace_lines, frame.f_trace_opcodes = False, True
        executed += event == "opcode"
        return note

    gc.collect()
    gc.disable()
    try:
        sys.settrace(note)
        try:
            action()
        finally:
            sys.settrace(None)
    finally:
        gc.enable()
    return executed


def calls(action: Callable[[], Any]) -> tuple[Counter[str], Counter[str]]:
    """How often each Python function and each function in C is called in ``action``."""
    python: Counter[tuple[str, str]] = Counter()
    c: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            python[frame.f_code.co_filename, frame.f_code.co_name] += 1
        elif event == "c_call":
            c[f"C {getattr(argument, '__qualname__', argument)}"] += 1

    gc.collect()
    gc.disable()
    try:
        sys.setprofile(note)
        try:
            action()
        finally:
            sys.setprofile(None)
    finally:
        gc.enable()
    named: Counter[str] = Counter()
    for (file, name), number in python.items():
        named[f"{_importable(file)} {name}"] += number
    return named, c


def _importable(file: str) -> str:
    """A file's path from the folder of ``sys.path`` that it is imported from."""
    folders = sorted((str(Path(folder).resolve()) for folder in sys.path), key=len, reverse=True)
    path = Path(file).resolve() if file.startswith("/") or Path(file).exists() else Path(file)
    return next((path.relative_to(folder).as_posix() for folder in folders if path.is_relative_to(folder)), str(path))


# The parent


def costs(rounds: list[Data]) -> Data:
    """Ratios of A to B, and of what is nothing but noise."""
    found: Data = {}
    for key in ("token_ms", "prefill_ms"):
        values = [{name: statistics.median(entry[name][key]) for name in TURNS} for entry in rounds]
        spreads: Data = {
            kind: common.spread([_mean(entry, own) / _mean(entry, other) for entry in values])
            for kind, (own, other) in PAIRS.items()
        }
        noise = max(abs(end - 1) for end in spreads["noise"]["interval_95"])
        cost = spreads["A/B"]["median"] - 1
        found[key.removesuffix("_ms")] = {
            "ms_without": statistics.median([entry[name] for entry in values for name in ("B1", "B2")]),
            "overhead": cost,
            "noise": noise,
            "indistinguishable_from_zero": abs(cost) <= noise if len(rounds) >= ENOUGH else None,
            "ratios": spreads,
        }
    return found


def _mean(values: dict[str, float], turns: str) -> float:
    return statistics.geometric_mean([values[name] for name in turns.split()])


def difference(own: Data, other: Data) -> Data:
    """What the shim calls that upstream does not, and the other way round."""
    found: Data = {}
    for name in own:
        if name == "error":
            continue
        a, b = own[name], other[name]
        total = {kind: [a[kind][-1], b[kind][-1]] for kind in ("python", "c")}
        functions = {key: [a["functions"].get(key, 0), b["functions"].get(key, 0)] for key in a["functions"]}
        functions |= {key: [0, number] for key, number in b["functions"].items() if key not in functions}
        differ = {key: pair for key, pair in functions.items() if pair[0] != pair[1]}
        found[name] = {
            "python_calls": total["python"],
            "c_calls": total["c"],
            "more": sum(pair[0] for pair in total.values()) / sum(pair[1] for pair in total.values()) - 1,
            "instructions": [a["instructions"][-1], b["instructions"][-1]],
            "all_counts": {
                side: {kind: counted[kind] for kind in (*total, "instructions")}
                for side, counted in (("with", a), ("without", b))
            },
            "differing": dict(sorted(differ.items(), key=lambda item: -abs(item[1][0] - item[1][1]))[:LISTED]),
            "differing_functions": len(differ),
        }
    return found


def measure(
    shape: str,
    *,
    out: Path | None,
    minutes: float,
    blocks: int,
    clock: str,
    folder: Path | None,
    options: list[str],
    note: str | None,
) -> Data:
    """Build, load in two processes, and time one of them, a third of the time each model."""
    script = Path(__file__)
    deadline = time.monotonic() + 60 * minutes
    result = common.header(script, sys.modules[__name__], shape, options, note)
    settings = {
        "tokens": TOKENS,
        "untimed": UNTIMED,
        "prefill": PREFILL,
        "turns": TURNS,
        "pairs": PAIRS,
        "clock": clock,
    }
    result |= {"settings": settings, "models": {}}
    with (
        common.temporary("idle-shim-", folder or small_card_models.work_folder(_base(shape))) as work,
        common.workers(script, work) as start,
    ):
        order = {"shape": shape, "folder": str(work), "clock": clock}
        shimmed, never = start(True), start(False)
        built = shimmed({"do": "build", **order})
        if built["error"] is not None:
            raise SystemExit(f"the checkpoint could not be built: {built['error']}")
        result |= {key: value for key, value in built.items() if key != "error"}
        never.wait()
        for number, model in enumerate(MODELS):
            until = time.monotonic() + (deadline - time.monotonic()) / (len(MODELS) - number)
            entry: Data = {"what": MODELS[model], "rounds": []}
            result["models"][model] = entry
            problems = _count_both(shimmed, never, {"model": model, **order}, entry)
            if problems:
                result["problems"] += [f"{model}, {problem}" for problem in problems]
                common.write(result, out)
                break
            _time(shimmed, order, entry, until=until, blocks=blocks)
            if len(entry["rounds"]) < blocks:
                result["not_run"].append(f"{model}: {blocks - len(entry['rounds'])} of {blocks} rounds")
            common.write(result, out)
            print(text(model, entry), flush=True)
    return result


def _count_both(shimmed: common.Worker, never: common.Worker, order: Data, entry: Data) -> list[str]:
    """Load and count in both processes; what went wrong."""
    both = {"with": shimmed, "without": never}
    entry["prepared"] = {name: worker({"do": "prepare", **order}) for name, worker in both.items()}
    entry["calls"] = {}
    counted = {name: worker({"do": "count", **order}) for name, worker in both.items()}
    counted["switched off"] = shimmed({"do": "count", "switched": True, **order})
    raised = [
        f"{name}: {data['error']}"
        for part in (entry["prepared"], counted)
        for name, data in part.items()
        if data["error"] is not None
    ]
    if raised:
        return raised
    entry["calls"] = difference(counted["with"], counted["without"])
    left = difference(counted["switched off"], counted["without"])
    entry["left_by_switching"] = {name: data["differing"] for name, data in left.items()}
    return [f"{name}, switched off, calls {found}" for name, found in entry["left_by_switching"].items() if found]


def _time(worker: common.Worker, order: Data, entry: Data, *, until: float, blocks: int) -> None:
    longest = 0.0
    for number in range(blocks):
        if number and time.monotonic() + longest > until:
            break
        began = time.monotonic()
        done = worker({"do": "block", **order})
        if done["error"] is not None:
            entry["rounds_failed"] = done
            return
        longest = max(longest, time.monotonic() - began) if number else 0.0  # the first one makes the switch
        entry["rounds"].append({name: done[name] for name in TURNS})
    entry["costs"] = costs(entry["rounds"])


def text(model: str, entry: Data) -> str:
    parts = [f"{model:<8}"]
    for name, cost in entry.get("costs", {}).items():
        low, high = cost["ratios"]["A/B"]["interval_95"]
        parts.append(
            f"{name} {cost['ms_without']:.2f} ms, ratio {1 + cost['overhead']:.4f} ({low:.4f} to {high:.4f}; "
            f"noise {cost['noise']:.4f}; {cost['ratios']['A/B']['of']} rounds)"
        )
    for name, data in entry["calls"].items():
        parts.append(f"{name} calls {sum(data['python_calls'][:1] + data['c_calls'][:1])} {100 * data['more']:+.2f} %")
        own, other = data["instructions"]
        parts.append(f"instructions {own} {100 * (own / other - 1):+.2f} %")
    return "  ".join(parts)


ACTIONS: dict[str, Callable[[Order], Data]] = {"build": build, "prepare": prepare, "block": block, "count": count}


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__, sorted({*small_card_cases.SHAPES, *TINY}), minutes=1.5)
    parser.add_argument("--blocks", type=int, default=BLOCKS, help=f"rounds of each model (default: {BLOCKS})")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    arguments = parser.parse_args(argv)
    if arguments.child:
        return common.serve(ACTIONS)
    if arguments.shape is None:
        parser.error("--shape is required")
    result = measure(
        arguments.shape,
        out=arguments.out,
        minutes=arguments.minutes,
        blocks=arguments.blocks,
        clock=arguments.clock,
        folder=arguments.work,
        options=common.shown(arguments),
        note=arguments.note,
    )
    return common.ended(result)


if __name__ == "__main__":
    sys.exit(main())
