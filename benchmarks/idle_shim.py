"""What does the shim cost where it has nothing to do: a forward and a decoded token of a model that is wholly on the
GPU, with every patch applied, against upstream as it is?

python benchmarks/idle_shim.py --shape E2B|E4B --out FILE.json [--minutes N] [--blocks N]

Random weights in the real shape (no network), 4-bit with double quantization, without and with an adapter on the
language model and both towers. Two processes with the shim (A) and two without (B) load the same model and stay alive;
one at a time decodes a block of tokens and runs a few prefills, in turns (A1 B1 B2 A2, then the other way round). A
cost is the ratio of A to B in one round; next to it stand the ratios of A to A and of B to B, which are nothing but
noise. A cost is called indistinguishable from zero where its median is no further from 1 than the 95 % intervals of
these reach; of fewer than four rounds nothing is said.

And exactly: the Python and C functions called in a prefill and in a decoded token, counted by ``sys.setprofile``, with
the shim and without, and which of them differ. These counts are the same on every machine.

Exit code 1: a process raised. A cost is a result.

`--shape tiny` runs without a GPU, too.
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

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import common  # noqa: E402
import small_card_cases  # noqa: E402
import small_card_device  # noqa: E402
import small_card_models  # noqa: E402
from common import Data, Order  # noqa: E402

import gemma4_compat  # noqa: E402

TOKENS = 32
PREFILL = 512
PREFILLS = 3
BLOCKS = 8
#: With fewer there is no verdict: processes differ by more than a block or two can show.
ENOUGH = 4
#: How often calls are counted; the counts should be the same.
COUNTS = 3
LISTED = 40
MODELS = {"base": "4-bit, everything on the GPU", "adapter": "the same with an adapter"}
WORKERS = {"A1": True, "B1": False, "B2": False, "A2": True}
#: Numerator and denominator of the cost and of the two kinds of noise.
PAIRS = {"A/B": (("A1", "B1"), ("A2", "B2")), "A/A": (("A1", "A2"),), "B/B": (("B1", "B2"),)}


# In a worker

_model: Any = None


def build(order: Order) -> Data:
    """The checkpoint and the adapters."""
    return small_card_models.build(order["shape"], Path(order["folder"]), everywhere=True)


def prepare(order: Order) -> Data:
    """Load the base model, or put the adapter on it, and warm up."""
    global _model
    import torch
    from peft import PeftModel

    folder = Path(order["folder"])
    if order["model"] == "base":
        _model = small_card_models.load(order["shape"], small_card_cases.CASES["all-gpu"], folder)
    else:
        _model = PeftModel.from_pretrained(_model, folder / "adapter-linear").eval()
    states = Counter(str(status.state) for status in gemma4_compat.status().values())
    with torch.no_grad():
        small_card_models.generate(_model, 4)
        _prefill(order)
    return {"patches": dict(states), **small_card_device.memory()}


def _ids(order: Order) -> Any:
    return small_card_models.prompt(_model, 64 if order["shape"] == "tiny" else PREFILL)


def _prefill(order: Order) -> Any:
    return _model(input_ids=_ids(order), logits_to_keep=1)


def block(order: Order) -> Data:
    """Milliseconds of each token of a generate, and of some prefills."""
    import torch

    gc.collect()
    gc.disable()
    try:
        with torch.no_grad():
            _, clock = small_card_models.generate(_model, TOKENS)
            tokens = [1000 * (after - before) for before, after in itertools.pairwise(clock.times[1:])]
            prefills = []
            for _ in range(PREFILLS):
                small_card_device.synchronize()
                started = time.perf_counter()
                _prefill(order)
                small_card_device.synchronize()
                prefills.append(1000 * (time.perf_counter() - started))
    finally:
        gc.enable()
    return {"token_ms": tokens, "prefill_ms": prefills}


def count(order: Order) -> Data:
    """The functions that a prefill and a decoded token call."""
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
                "functions": {key: number for part in runs[-1] for key, number in part.items()},
            }
    return found


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
    """Ratios of A to B, and of what is the same: A to A, B to B."""
    found: Data = {}
    for key in ("token_ms", "prefill_ms"):
        values = [{name: statistics.median(entry[name][key]) for name in WORKERS} for entry in rounds]
        spreads: Data = {
            kind: common.spread([entry[own] / entry[other] for entry in values for own, other in pairs])
            for kind, pairs in PAIRS.items()
        }
        noise = max(abs(end - 1) for kind in ("A/A", "B/B") for end in spreads[kind]["interval_95"])
        cost = spreads["A/B"]["median"] - 1
        found[key.removesuffix("_ms")] = {
            "ms_without": statistics.median([entry[name] for entry in values for name in ("B1", "B2")]),
            "overhead": cost,
            "noise": noise,
            "indistinguishable_from_zero": abs(cost) <= noise if len(rounds) >= ENOUGH else None,
            "ratios": spreads,
        }
    return found


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
            "all_counts": {"with": {k: a[k] for k in total}, "without": {k: b[k] for k in total}},
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
    folder: Path | None,
    options: list[str],
    note: str | None,
) -> Data:
    """Build, load in four processes, and time them in turns, half of the time each without and with the adapter."""
    script = Path(__file__)
    deadline = time.monotonic() + 60 * minutes
    result = common.header(script, sys.modules[__name__], shape, options, note)
    settings = {"tokens": TOKENS, "prefill": PREFILL, "prefills": PREFILLS, "pairs": PAIRS}
    result |= {"settings": settings, "models": {}}
    with (
        common.temporary("idle-shim-", folder or small_card_models.work_folder(shape)) as work,
        common.workers(script, work) as start,
    ):
        order = {"shape": shape, "folder": str(work)}
        builder = start(True)
        processes = {name: start(shim) for name, shim in WORKERS.items()}
        built = builder({"do": "build", **order})
        builder.close()
        if built["error"] is not None:
            raise SystemExit(f"the checkpoint could not be built: {built['error']}")
        result |= {key: value for key, value in built.items() if key != "error"}
        for worker in processes.values():
            worker.wait()
        for number, model in enumerate(MODELS):
            until = time.monotonic() + (deadline - time.monotonic()) / (len(MODELS) - number)
            entry: Data = {"what": MODELS[model], "rounds": []}
            result["models"][model] = entry
            entry["prepared"] = {
                name: worker({"do": "prepare", "model": model, **order}) for name, worker in processes.items()
            }
            entry["calls"] = {}
            counted = {name: processes[name]({"do": "count", **order}) for name in ("A1", "B1")}
            raised = [
                f"{model}, {name}: {data['error']}"
                for part in (entry["prepared"], counted)
                for name, data in part.items()
                if data["error"] is not None
            ]
            if raised:
                result["problems"] += raised
                common.write(result, out)
                break
            entry["calls"] = difference(counted["A1"], counted["B1"])
            _time(processes, order, entry, until=until, blocks=blocks)
            if len(entry["rounds"]) < blocks:
                result["not_run"].append(f"{model}: {blocks - len(entry['rounds'])} of {blocks} blocks")
            common.write(result, out)
            print(text(model, entry), flush=True)
    return result


def _time(processes: dict[str, common.Worker], order: Data, entry: Data, *, until: float, blocks: int) -> None:
    longest = 0.0
    for number in range(blocks):
        if number and time.monotonic() + longest > until:
            return
        began = time.monotonic()
        turns = list(WORKERS) if number % 2 == 0 else list(WORKERS)[::-1]
        done = {name: processes[name]({"do": "block", **order}) for name in turns}
        if any(data["error"] is not None for data in done.values()):
            entry["rounds_failed"] = done
            return
        longest = max(longest, time.monotonic() - began)
        entry["rounds"].append({"order": turns, **done})
        entry["costs"] = costs(entry["rounds"])


def text(model: str, entry: Data) -> str:
    parts = [f"{model:<8}"]
    for name, cost in entry.get("costs", {}).items():
        low, high = cost["ratios"]["A/B"]["interval_95"]
        parts.append(
            f"{name} {cost['ms_without']:.2f} ms, {100 * cost['overhead']:+.2f} % "
            f"({100 * (low - 1):+.2f} to {100 * (high - 1):+.2f}; noise {100 * cost['noise']:.2f})"
        )
    for name, data in entry["calls"].items():
        parts.append(f"{name} calls {sum(data['python_calls'][:1] + data['c_calls'][:1])} {100 * data['more']:+.2f} %")
    return "  ".join(parts)


ACTIONS: dict[str, Callable[[Order], Data]] = {"build": build, "prepare": prepare, "block": block, "count": count}


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__, sorted(small_card_cases.SHAPES), minutes=2.0)
    parser.add_argument("--blocks", type=int, default=BLOCKS, help=f"of each model (default: {BLOCKS})")
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
        folder=arguments.work,
        options=common.shown(arguments),
        note=arguments.note,
    )
    for problem in result["problems"]:
        print(f"PROBLEM {problem}", file=sys.stderr)
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
