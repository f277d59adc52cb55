"""How fast does a model decode deep in a text: custom kernels, PyTorch's bits, the release before, llama.cpp?

python benchmarks/decoding/depth.py --shape E2B --out FILE.json [--contexts 64,2048,8192,32768]
    [--cases gpu,host,gpu+lora,host+lora,streamed] [--ways before,exact,own] [--parts first,speed,profile,check]
    [--llama-cpp TREE]

Random weights in the real shape (no network, no checkpoint on disk), 4-bit with double quantization, batch 1, greedy,
`generate` with `cache_implementation="static"` and a streamer, as a chat calls it. Ways:

before     fused as in the release before: pointwise operations only
exact      PyTorch's bits, with products and norms of ours
own        `gemma4_compat.decode_fast`

All of them run on the card; with table and towers on the host not the release before; of streamed layers, which the
bus bounds, only the last one. Parts of a case:

first      of placements on the card: seconds of a first call, to its first token and until it is fused, and of the
           same call with kernels that are compiled already
speed      tokens a second at each context, the ways in turns, in several rounds; llama.cpp takes its turn with them
profile    of placements on the card: the kernels of a token at the first context and the last, by name
check      of the first case: at 2,048 tokens the last way with a text that was read, in turns with one that was not

Contexts above 64 are not read: depth_measure.py says how that is done. A way that this version does not have is listed
as not run.

`--llama-cpp TREE` is llama.cpp as peers.py takes it, with the heads of GGUF files that benchmarks/peers/heads.py made
for this shape: Q4_0, flash attention, a prompt that it has read, its own C API. It has no streamed layers.

The file is written after every step. Exit code 1: something raised, or nothing was replayed or fused on a GPU.
`--shape tiny` runs without a GPU; steps are recorded by a stand-in then.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common
from benchmarks.common import Data
from benchmarks.decoding import depth_measure, depth_report, models
from benchmarks.decoding.graph_decoding import Run, Stopped
from benchmarks.decoding.models import ADAPTED, WHERE
from benchmarks.peers import heads
from benchmarks.peers import llama as peers_llama
from benchmarks.small_card.models import PROMPT

PARTS = ("first", "speed", "profile", "check")
CASES = tuple(f"{where}{adapter}" for where in ("gpu", "host", "half", "streamed") for adapter in ("", ADAPTED))
WAYS = depth_measure.WAYS
LLAMA = depth_report.LLAMA
#: Tokens of a turn, and after how many they are counted: by then the host has stopped waiting for each token, unless a
#: step takes more than 32 ms.
TOKENS = 68
SETTLED = 16
CHECKED = 2048
VOCABULARY = 250  # tokens that a text for llama.cpp is made of; any shape has them
TURN = {"way": "replayed", "tokens": TOKENS, "settled": SETTLED}


class Measured:
    """Our process, llama.cpp's, and what is asked of them."""

    def __init__(self, run: Run, llama: Run | None, arguments: Any) -> None:
        self.run, self.llama, self.arguments = run, llama, arguments
        self.asked: list[str] = list(arguments.ways)
        self.ways: list[str] = []  # of the case

    def case(self, name: str) -> None:
        """Every part of it; only an adapter is to come where the model is loaded already."""
        where, _, adapter = name.partition("+")
        entry: Data = {"what": WHERE[where] + (", LoRA" if adapter else "")}
        self.ways = self.asked if where == "gpu" else [way for way in self.asked if way != "before"] or self.asked
        if where in ("half", "streamed"):
            self.ways = self.asked[-1:]
        run = self.run
        run.result["cases"][name] = entry
        run.order["where"] = where
        if not adapter or run.loaded != where:
            run.loaded = None
            entry["load"] = run.tell("load", f"{name}: load")
            if "error" in entry["load"]:
                return
        run.loaded = None if adapter else where
        if adapter:
            entry["adapter"] = run.tell("adapt", f"{name}: adapter")
            if "error" in entry["adapter"]:
                return
        if "first" in self.arguments.parts and where == "gpu":
            entry["first"] = {
                way: {when: self._tell("first", name, way) for when in ("cold", "later")} for way in self.ways
            }
            run.keep(depth_report.first_line(name, entry))
        peer = self._peer(entry, name)
        entry["contexts"] = {}
        for context in self.arguments.contexts:
            self.context(name, entry, context, peer)
        if "check" in self.arguments.parts and name == next(iter(run.result["cases"])):
            self.check(name, entry)

    def context(self, name: str, entry: Data, context: int, peer: Run | None) -> None:
        """Every way is captured, then all take turns."""
        found: Data = {"warm": {}, "rounds": []}
        entry["contexts"][str(context)] = found
        at = f"{name} at {context}"
        turns: dict[str, Callable[[], Data]] = {}
        for way in self.ways:
            found["warm"][way] = self._tell("warm", at, way, prompt=context)
            if "error" not in found["warm"][way]:
                turns[way] = lambda way=way: self._tell("turn", at, way, prompt=context)
        if peer is not None and "error" not in _told(peer, "deepen", at, prompt=context):
            turns[LLAMA] = lambda: _told(peer, "deep", at)
        for number in range(self.arguments.rounds if "speed" in self.arguments.parts else 0):
            said = {way: turns[way]() for way in list(turns)[:: 1 if number % 2 == 0 else -1]}
            found["rounds"].append({way: said[way]["tok_s"] for way in turns if "tok_s" in said[way]})
            found["captured"] = found.get("captured", 0) + sum(one.get("captured", 0) for one in said.values())
            found["summary"] = depth_report.summary(found["rounds"])
            self.run.keep()
        ends = self.arguments.contexts[0], self.arguments.contexts[-1]
        if "profile" in self.arguments.parts and context in ends and name.startswith("gpu"):
            found["profile"] = {way: self._tell("profile", at, way, prompt=context) for way in self.ways}
            self.run.keep(depth_report.profile_lines(at, found["profile"], self.arguments.lines))
        self.run.keep(depth_report.line(name, context, found))

    def check(self, name: str, entry: Data) -> None:
        """Whether it matters that a text was not read."""
        way, rounds = self.ways[-1], []
        self._tell("warm", f"{name} check", way, prompt=CHECKED)
        for number in range(self.arguments.rounds):
            both = [(key, key == "read") for key in ("read", "filled")][:: 1 if number % 2 == 0 else -1]
            said = {
                key: self._tell("turn", f"{name} check, {key}", way, prompt=CHECKED, read=read) for key, read in both
            }
            if any("error" in one for one in said.values()):
                return
            rounds.append({key: said[key]["tok_s"] for key in ("read", "filled")})
        entry["check"] = {"way": way, "rounds": rounds, "summary": depth_report.summary(rounds)}
        self.run.keep(depth_report.check_line(name, entry))

    def _tell(self, do: str, name: str, way: str, **more: Any) -> Data:
        return self.run.tell(do, f"{name}, {way}", arithmetic=way, **TURN, **more)

    def _peer(self, entry: Data, name: str) -> Run | None:
        """llama.cpp with what this case has where."""
        where, _, adapter = name.partition("+")
        peer = self.llama
        if peer is None or where not in ("gpu", "host") or "speed" not in self.arguments.parts:
            return None
        room = self.arguments.contexts[-1] + TOKENS * (self.arguments.rounds + 2) * len(self.arguments.contexts)
        table = "device" if where == "gpu" else "host"
        entry[LLAMA] = _told(peer, "load", name, table=table, context=room)
        if adapter and "error" not in entry[LLAMA]:
            entry[LLAMA] |= _told(peer, "adapt", name)
        return None if "error" in entry[LLAMA] else peer


def _told(peer: Run, do: str, name: str, **more: Any) -> Data:
    """What llama.cpp answers; our cases go on without it."""
    try:
        return peer.tell(do, f"{name}, {LLAMA}: {do}", **more)
    except Stopped:
        return {"error": "it has ended"}


def peer_of(run: Run, arguments: Any, work: Path, start: Callable[..., common.Worker]) -> Run | None:
    """How llama.cpp is told things, with its files made."""
    tree = arguments.llama_cpp.resolve()
    os.environ |= {peers_llama.LIBRARIES: str(tree / "build" / "bin"), "GGML_NO_BACKTRACE": "1"}
    began = time.monotonic()
    try:
        files = {kind: heads.filled(heads.named(tree, arguments.shape, kind), work) for kind in heads.KINDS}
    except OSError as error:
        run.result["not_run"].append(f"{LLAMA} ({error})")
        return None
    run.result["gguf"] = {kind: {"gib": file.stat().st_size / 2**30} for kind, file in files.items()}
    run.keep(f"{LLAMA}: files filled in {time.monotonic() - began:.0f} s")
    found = peers_llama.libraries(tree)
    peer = Run(run.result, run.out, run.deadline, lambda: start(False, LD_LIBRARY_PATH=found))
    on_gpu = run.result["machine"]["device"] != "CPU"
    peer.order = {"folder": str(work), "file": str(files["q4_0"]), "adapter": str(files["lora"]), "gpu": on_gpu}
    peer.order |= {"layers": 99, "threads": os.cpu_count() or 1, "flash": True, "tokens": TOKENS, "settled": SETTLED}
    peer.order["vocabulary"] = VOCABULARY
    return peer


def measured(arguments: Any, options: list[str], deadline: float) -> Data:
    script = Path(__file__)
    result = common.header(script, sys.modules[__name__], arguments.shape, options, arguments.note)
    result["settings"] = {"tokens": TOKENS, "settled": SETTLED, "prompt": PROMPT, "ways": arguments.ways}
    result["cases"] = {}
    folder = arguments.work or models.work_folder(arguments.shape)
    with (
        common.temporary("depth-", folder) as work,
        common.workers(script, work) as start,
        common.temporary("logs-", work) as logs,
        common.workers(Path(peers_llama.__file__), logs) as start_peer,
    ):
        run = Run(result, arguments.out, deadline, lambda: start(True))
        run.order = {"shape": arguments.shape, "folder": str(work), "saved": arguments.saved}
        run.order["allocated"] = arguments.allocated
        built = run.tell("build", "build")
        if "error" in built:
            raise SystemExit(f"the weights could not be built: {built['error']}")
        result.update(built)
        run.keep(f"built in {built['build_s']:.0f} s")
        llama = peer_of(run, arguments, work, start_peer) if arguments.llama_cpp else None
        asked = Measured(run, llama, arguments)
        for name in sorted(arguments.cases, key=CASES.index):
            try:
                asked.case(name)
            except Stopped:
                run.loaded = None
            run.keep()
        for one in (run, llama):
            if one is not None:
                one.close()
        result["problems"] += depth_report.problems(result)
        run.keep()
    return result


def serve() -> int:
    """Be our process; without a GPU steps are recorded by a stand-in."""
    import peft  # noqa: F401  (while events are torch's)
    import torch
    from transformers import Gemma4ForConditionalGeneration  # noqa: F401

    from gemma4_compat._graphs import recording
    from gemma4_compat._lab.stand_ins import tape

    on_cpu = not torch.cuda.is_available()
    with tape.standing_in(recording.RECORDERS) if on_cpu else contextlib.nullcontext():
        return common.serve(depth_measure.ACTIONS)


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__, sorted(models.SHAPES), minutes=5.0)
    parser.add_argument("--contexts", default="64,2048,8192,32768", help="tokens before the first that is counted")
    parser.add_argument("--cases", default="gpu,host,gpu+lora,host+lora,streamed", help=", ".join(CASES))
    parser.add_argument("--ways", default="before,exact,own", help=f"of {', '.join(WAYS)}")
    parser.add_argument("--parts", default="first,speed,profile", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=5, help="of each context's speed (5)")
    parser.add_argument("--lines", type=int, default=12, help="kernels that are printed of a profile (12)")
    parser.add_argument("--allocated", type=int, default=0, help="tokens that a cache has room for, at least (0)")
    parser.add_argument("--saved", action="store_true", help="write a checkpoint and load it, as other benchmarks do")
    parser.add_argument("--llama-cpp", type=Path, help="llama.cpp's tree, built, with heads of this shape's files")
    arguments = parser.parse_args(argv)
    if arguments.child:
        return serve()
    if arguments.shape is None:
        parser.error("--shape is required")
    deadline = time.monotonic() + 60 * arguments.minutes
    options = [option for option in common.shown(arguments) if option != str(arguments.llama_cpp)]
    if arguments.llama_cpp:
        options.insert(options.index("--llama-cpp") + 1, "TREE")
    for option, known in (("cases", CASES), ("ways", WAYS), ("parts", PARTS)):
        common.chosen(parser, arguments, option, known)
    arguments.contexts = sorted(map(int, arguments.contexts.split(",")))
    result = measured(arguments, options, deadline)
    print(f"\n{depth_report.table(result)}")
    return common.ended(result)


if __name__ == "__main__":
    sys.exit(main())
