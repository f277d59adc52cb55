"""What does a decoding step replayed as one CUDA graph give, against the same step run eagerly: tokens a second, bits,
short answers, memory over thousands of tokens; and against what upstream compiles?

python benchmarks/decoding/graph_decoding.py --shape E2B --out FILE.json
    [--cases gpu,gpu+lora,...] [--parts speed,bits,...]

Random weights in the real shape (no network), 4-bit with double quantization (experts too), a static cache. "Eager" is
the same `generate` call with upstream's switch `disable_compile=True`, in the same process. Parts:

speed      tokens a second after the first ones, in turns, in several rounds; the time to the first token; the VRAM
           peak of each way, and the planner's; of streamed layers, what share of the bus that is
fusing     tokens a second of replays with fused kernels and without them, in turns
waiting    tokens a second of replays whose stops are read one step late, and with the host waiting for each, in turns
streamed   after `decode_fast`, milliseconds of a token without a streamer, with a user's, and with transformers' own,
           greedy and sampled
bits       tokens and logits of both ways: greedy, sampled, beams, padded, an image, across and past the window, three
           turns on one cache, adapters switched; graphs are fused early in them
short      seconds of answers of 16, 64 and 256 tokens
compiled   bf16 on the GPU without the shim, where upstream compiles the step, in a process of its own; the same model
           after `gemma4_compat.decode_fast`
endurance  thousands of tokens over changing prompts, batch sizes and adapters, with the first case that has an
           adapter: memory after each call, some calls compared

The file is written after every step. Exit code 1: something raised, bits differ, nothing was replayed on a GPU, or
memory grew. `--shape tiny` runs without a GPU, too: then both ways are eager.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common
from benchmarks.common import Data, Order
from benchmarks.decoding import (
    measure,
    models,
    report,
)
from benchmarks.decoding.models import ADAPTED, SECOND, WHERE

PARTS = ("speed", "fusing", "waiting", "streamed", "bits", "short", "compiled", "endurance")
CASES = tuple(f"{where}{adapter}" for where in WHERE if where != "bf16" for adapter in ("", ADAPTED))
#: Tokens of a turn, and after how many of them tokens are counted: a replay has to be captured first.
TOKENS = {"eager": 12, "replayed": 100, "compiled": 100}
SETTLED = {"eager": 1, "replayed": 5, "compiled": 5}
#: An eager answer is measured once, a replayed one so often.
REPEATS = 3
CALLS = 6
CHECK_EVERY = 7
FUSING_ROUNDS = 3
#: What a process may take beyond the deadline before it is ended.
GRACE_S = 10


class Stopped(Exception):  # noqa: N818 (it is no error: the time is up, or the process has died)
    """Nothing more can be done with this model."""


class Run:
    """The process that has the model, what it is told, and the result so far."""

    def __init__(self, result: Data, out: Path | None, deadline: float, start: Callable[[], common.Worker]) -> None:
        self.result, self.out, self.deadline, self.start = result, out, deadline, start
        self.worker: common.Worker | None = None
        self.order: Order = {}
        self.took: dict[str, float] = {}
        self.loaded: str | None = None  # where the model is that has no adapter

    def tell(self, do: str, name: str, **more: Any) -> Data:
        """What the process answers; an error is kept as a problem of ``name``, what there is no time for as not run.

        Raises:
            Stopped: the time is up, or the process cannot go on.
        """
        kind = f"{do} {sorted(item for item in more.items() if item[0] in ('way', 'tokens', 'where'))}"
        left = self.deadline - time.monotonic()
        if left <= self.took.get(kind, 0.0):
            self.result["not_run"] += [name] * (name not in self.result["not_run"])
            if left <= 0:
                raise Stopped(name)
            return {"error": "no time"}
        if self.worker is None:
            self.worker = self.start()
        began = time.monotonic()
        found = self.worker({**self.order, "do": do, **more}, timeout=left + GRACE_S)
        self.took[kind] = max(self.took.get(kind, 0.0), time.monotonic() - began)
        error = found.pop("error")
        if error is None:
            return found
        if error.startswith("no end after"):
            self.result["not_run"].append(name)
        else:
            self.result["problems"].append(f"{name}: {error}")
        if self.worker.process.poll() is not None:
            self.worker = None
            raise Stopped(name)
        return {"error": error}

    def keep(self, text: str | None = None) -> None:
        """Write the result so far, and say something."""
        common.write(self.result, self.out)
        if text:
            print(text, flush=True)

    def close(self) -> None:
        """End the process."""
        if self.worker is not None:
            self.worker.close()
            self.worker = None


# Parts


def speed(run: Run, name: str, entry: Data, rounds: int, ways: tuple[str, ...] = ("eager", "replayed")) -> None:
    """Each way once for what it holds and how it begins, then in turns."""
    found: Data = {"first": {}, "rounds": []}
    entry["speed"] = found

    def turn(way: str, **more: Any) -> Data:
        settled = SETTLED[way]
        return run.tell("turn", f"{name} speed", way=way, tokens=TOKENS[way], settled=settled, **more)

    for way in ways:
        found["first"][way] = turn(way, peak=True)
        if "error" in found["first"][way]:
            return
    if "replayed" in ways:  # a later call prefills beside the graph
        found["second"] = {"replayed": turn("replayed", peak=True)}
        if "error" in found["second"]["replayed"]:
            return
    for number in range(rounds):
        turns = {way: turn(way) for way in (ways if number % 2 == 0 else ways[::-1])}
        if any("error" in one for one in turns.values()):
            return
        found["rounds"].append(turns)
        found["summary"] = report.speed_summary(entry, run.result)
        run.keep()
    run.keep(report.speed_line(name, entry))


def fusing(run: Run, name: str, entry: Data, rounds: int) -> None:
    """Replays with fused kernels and without."""
    orders = {way: {"plain": way == "plain", "settled": SETTLED["replayed"]} for way in ("plain", "fused")}
    in_turns(run, name, entry, "fusing", rounds, orders, report.fusing_summary)


def waiting(run: Run, name: str, entry: Data, rounds: int) -> None:
    """Replays between which the host waits for the token, and does not."""
    same = {"tokens": TOKENS["replayed"], "settled": SETTLED["replayed"]}
    orders = {way: {"waits": way == "waiting", **same} for way in ("waiting", "deferred")}
    in_turns(run, name, entry, "waiting", rounds, orders, report.waiting_summary)


def streamed(run: Run, name: str, entry: Data, rounds: int) -> None:
    """What a streamer costs after ``decode_fast``."""
    if "error" in run.tell("decode_fast", f"{name} streamed: decode_fast"):
        return
    orders = {
        f"{kind} {'sampled' if sampled else 'greedy'}": {"streamer": kind, "sampled": sampled}
        for sampled in (False, True)
        for kind in ("none", "user", "transformers")
    }
    in_turns(run, name, entry, "streamed", rounds, orders, report.streamed_summary)


def in_turns(
    run: Run,
    name: str,
    entry: Data,
    part: str,
    rounds: int,
    orders: dict[str, Data],
    summary: Callable[[list[Data]], Data],
) -> None:
    """Some ways of one part, by what each is told; the one that was first in a round is the last in the next."""
    found: Data = {"rounds": []}
    entry[part] = found
    for number in range(rounds):
        ways = list(orders)[:: 1 if number % 2 == 0 else -1]
        turns = {way: run.tell(part, f"{name} {part}", **orders[way]) for way in ways}
        if any("error" in one for one in turns.values()):
            return
        found["rounds"].append(turns)
        found["summary"] = summary(found["rounds"])
        run.keep()
    run.keep(f"{name:<14} {part}: {found.get('summary')}")


def bits(run: Run, name: str, entry: Data) -> None:
    found = entry["bits"] = {}
    for scenario in measure.SCENARIOS:
        if scenario == "adapter switched" and not name.endswith(ADAPTED):
            continue
        found[scenario] = run.tell("bits", f"{name} {scenario}", scenario=scenario)
        run.keep()
    run.keep(report.bits_line(name, entry))


def short(run: Run, name: str, entry: Data, lengths: tuple[int, ...]) -> None:
    found = entry["short"] = {}
    for tokens in lengths:
        seconds: Data = {"replayed": [], "eager": []}
        found[str(tokens)] = seconds
        for way, times in (("replayed", REPEATS), ("eager", 1)):
            for _ in range(times):
                said = run.tell("answer", f"{name} answer of {tokens}, {way}", way=way, tokens=tokens)
                seconds[way] += [said["seconds"]] if "seconds" in said else []
        run.keep()
    run.keep(report.short_line(name, entry))


def endurance(run: Run, name: str, entry: Data, wanted: int) -> None:
    adapters = [None, "default", SECOND] if name.endswith(ADAPTED) else [None]
    calls = measure.schedule(adapters, wanted, CHECK_EVERY)
    found: Data = {"wanted": wanted, "calls": [], "steps": {}}
    entry["endurance"] = found
    for first in range(0, len(calls), CALLS):
        said = run.tell("endure", f"{name} endurance", calls=calls[first : first + CALLS])
        if "error" in said:
            return
        found["calls"] += said["calls"]
        for key, value in said["steps"].items():
            found["steps"][key] = value if key == "reasons" else found["steps"].get(key, 0) + value
        found["summary"] = report.endurance_summary(found["calls"])
        run.keep()
    run.keep(report.endurance_line(name, entry))


def compiled(run: Run, start: Callable[[bool], common.Worker], rounds: int) -> None:
    """Upstream alone first; then replay, in the process that the others used."""
    found = run.result["compiled"] = {}
    upstream = Run(run.result, run.out, run.deadline, lambda: start(False))
    upstream.order = run.order | {"where": "bf16"}
    entry: Data = {"what": "compiled by upstream"}
    found["upstream"] = entry
    try:
        run.tell("free", "compiled")
        entry["load"] = upstream.tell("load", "compiled: load")
        if "error" not in entry["load"]:
            speed(upstream, "compiled", entry, rounds, ("compiled",))
    except Stopped:
        pass  # replay is measured if there is time
    finally:
        upstream.close()
    entry = {"what": "decode_fast"}
    found["replayed"] = entry
    run.order["where"] = "bf16"
    entry["load"] = run.tell("load", "bf16: load")
    if "error" not in entry["load"] and "error" not in run.tell("decode_fast", "bf16: decode_fast"):
        speed(run, "bf16", entry, rounds)


# The whole


def case(run: Run, name: str, arguments: Any) -> None:
    """Every part of it; the model is loaded already where only an adapter is to come."""
    where, _, adapter = name.partition("+")
    entry: Data = {"what": WHERE[where] + (", LoRA" if adapter else "")}
    run.result["cases"][name] = entry
    run.order["where"] = where
    steps: dict[str, Callable[[], None]] = {
        "speed": lambda: speed(run, name, entry, arguments.rounds),
        "fusing": lambda: fusing(run, name, entry, FUSING_ROUNDS),
        "waiting": lambda: waiting(run, name, entry, arguments.rounds),
        "bits": lambda: bits(run, name, entry),
        "short": lambda: short(run, name, entry, arguments.answers),
        "endurance": lambda: endurance(run, name, entry, arguments.endurance_tokens),
        "streamed": lambda: streamed(run, name, entry, arguments.rounds),  # the last: the model is another then
    }
    wanted = [part for part in steps if part in arguments.parts]
    if name != lasting(arguments.cases):
        wanted = [part for part in wanted if part != "endurance"]
    try:
        if not adapter or run.loaded != where:
            run.loaded = None
            entry["load"] = run.tell("load", f"{name}: load", where=where)
        if adapter and "error" not in entry.get("load", {}):
            run.loaded = None  # the base is not bare any more
            entry["load"] = run.tell("adapt", f"{name}: adapter")
        elif "error" not in entry["load"]:
            run.loaded = where
        while wanted and "error" not in entry["load"]:
            part = wanted.pop(0)
            steps[part]()
    except Stopped:
        run.loaded = None
    run.result["not_run"] += [f"{name} {part}" for part in wanted]


def lasting(cases: list[str]) -> str:
    """The case that endurance is shown with."""
    return next((name for name in cases if name.endswith(ADAPTED)), cases[0])


def measured(arguments: Any, options: list[str], deadline: float) -> Data:
    script = Path(__file__)
    result = common.header(script, sys.modules[__name__], arguments.shape, options, arguments.note)
    result["settings"] = {"tokens": TOKENS, "settled": SETTLED, "prompt": measure.PROMPT}
    result["cases"] = {}
    folder = arguments.work or models.work_folder(arguments.shape)
    with common.temporary("graph-decoding-", folder) as work, common.workers(script, work) as start:
        run = Run(result, arguments.out, deadline, lambda: start(True))
        run.order = {"shape": arguments.shape, "folder": str(work), "tokens": TOKENS}
        built = run.tell("build", "build")
        if "error" in built:
            raise SystemExit(f"the checkpoint could not be built: {built['error']}")
        result.update(built)
        run.keep(f"built in {built['build_s']:.0f} s")
        for name in sorted(arguments.cases, key=CASES.index):
            if name.startswith("auto-") and result["machine"]["device"] == "CPU":
                result["not_run"].append(f"{name} (needs a GPU)")
                continue
            case(run, name, arguments)
            run.keep()
        if "compiled" in arguments.parts:
            with contextlib.suppress(Stopped):
                compiled(run, start, arguments.rounds)
        run.close()
        result["problems"] += report.problems(result)
        run.keep()
    return result


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__, sorted(models.SHAPES), minutes=5.0)
    parser.add_argument("--cases", default="gpu,gpu+lora,host,host+lora,streamed,streamed+lora", help=", ".join(CASES))
    parser.add_argument("--parts", default="speed,bits,short", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=5, help="of each case's speed (5)")
    parser.add_argument("--answers", default="16,64,256", help="tokens of the short answers")
    parser.add_argument("--endurance-tokens", type=int, default=10_000)
    arguments = parser.parse_args(argv)
    if arguments.child:
        return common.serve(measure.ACTIONS)
    if arguments.shape is None:
        parser.error("--shape is required")
    deadline = time.monotonic() + 60 * arguments.minutes
    options = common.shown(arguments)
    for option, known in (("cases", CASES), ("parts", PARTS)):
        common.chosen(parser, arguments, option, known)
    arguments.answers = tuple(map(int, arguments.answers.split(",")))
    result = measured(arguments, options, deadline)
    print(f"\n{report.table(result)}")
    return common.ended(result)


if __name__ == "__main__":
    sys.exit(main())
