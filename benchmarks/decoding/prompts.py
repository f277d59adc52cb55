"""How long does a prompt take to its first token, and how much memory: upstream, the shim's ways, llama.cpp?

python benchmarks/decoding/prompts.py --shape E2B --out FILE.json [--lengths 64,512,2048,8192,32768]
    [--ways upstream,default,at_once,any_length,chunks] [--where gpu] [--rounds 5] [--chunk 512] [--llama-cpp TREE]

Random weights in the real shape (no network), 4-bit with double quantization, batch 1, random text. Ways:

upstream    `generate` in a process without the shim, with its model on the same card; only with `--where gpu`, and not
            with experts, which upstream does not quantize
default     the same call with the shim
at_once     `gemma4_compat.decode_fast`
any_length  `decode_fast(any_length=True)`, each prompt of another length
chunks      `decode_fast`, `prefill_chunk_size` of `--chunk`

Every way reads a prompt before anything is measured: some wake patches, after which all graphs are captured again. At
each length `any_length` first decodes 200 tokens, so that the step which reads its last token is fused. Then every way
reads three prompts, one of which is captured, and as many more as it takes until short graphs are fused. After that
the ways take turns, each with a text that was not read before, and the order is turned round in every second round.
Last, each reads one more, for the most memory above that of the loaded model. `--shape 26B-A4B --where experts` has
its experts in host memory.

`--llama-cpp TREE` is llama.cpp as depth.py takes it: Q4_0, flash attention, its own processing of prompts in pieces of
512, through its C API; it takes its turn with the others.

The file is written after every length. Exit code 1: something raised, or a GPU captured in a turn. `--shape tiny` runs
without a GPU; a stand-in captures then, and milliseconds mean nothing: try `--lengths 6,20,40 --chunk 8`.
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
from benchmarks.common import Data
from benchmarks.decoding import depth, models, prompts_measure
from benchmarks.decoding.graph_decoding import Run, Stopped
from benchmarks.experts import models as experts_models
from benchmarks.peers import llama as peers_llama
from gemma4_compat._generation.prompts.prompts import MAX_FUSED, Progress

WAYS = tuple(prompts_measure.WAYS)
LLAMA = depth.LLAMA
EXPERTS = prompts_measure.EXPERTS
WHERE = {"gpu": models.WHERE["gpu"], "host": models.WHERE["host"], EXPERTS: "experts in host memory"}
SHAPES = {"gpu": models.SHAPES, "host": models.SHAPES, EXPERTS: experts_models.SHAPES}
#: Prompts of a way before it is timed: the second of a length is captured.
FIRST = 3
#: Tokens that ``any_length`` decodes first at each length: its step is fused after at most 192.
DECODED = 200
#: Tokens that a prompt is shorter in each round, where no two are to have one length.
SHORTER = 1


class Measured:
    """The processes, and what is asked of them.

    Args:
        result: gets the figures, by length and way.
        peers: the process of each way.
        rounds: turns of each way.
        chunk: tokens of a chunk.
    """

    def __init__(self, result: Data, peers: dict[str, Run], rounds: int, chunk: int) -> None:
        self.result, self.peers, self.rounds, self.chunk = result, peers, rounds, chunk
        self._seed = 0

    def wake(self, prompt: int) -> None:
        """Every way once, so that no patch wakes in a turn."""
        for way in self.peers:
            self._read(way, max(prompt, self.chunk + 1) if way == "chunks" else prompt)

    def length(self, prompt: int) -> None:
        """Every way at this length."""
        found: Data = {"first": {}, "rounds": [], "replayed": {}, "captured": {}, "peak": {}}
        self.result["lengths"][str(prompt)] = found
        if "any_length" in self.peers and self.result["machine"]["device"] != "CPU":
            self._read("any_length", prompt, new=DECODED)  # before others capture: it may leave things on modules
        for way in self.peers:
            if way != "chunks" or prompt > self.chunk:
                found["first"][way] = [self._read(way, prompt - number) for number in self._numbers(way, FIRST)]
                for _ in range(self._until_fused(way, prompt)):
                    self._read(way, prompt)
        ways = [way for way, said in found["first"].items() if not any("error" in one for one in said)]
        for turn in range(self.rounds):
            said = {
                way: self._read(way, prompt - self._less(way, FIRST + turn)) for way in ways[:: 1 - 2 * (turn % 2)]
            }
            found["rounds"].append({way: said[way]["ms"] for way in ways if "ms" in said[way]})
            for kind in ("replayed", "captured"):
                for way in ways:
                    found[kind][way] = found[kind].get(way, 0) + said[way].get(f"prompts_{kind}", 0)
        for way in ways:
            if way != LLAMA:
                found["peak"][way] = self._read(way, prompt, peak=True).get("peak_gib_above_loaded")
        found["summary"] = {
            way: common.spread([one[way] for one in found["rounds"] if way in one])
            for way in ways
            if any(way in one for one in found["rounds"])
        }

    def _until_fused(self, way: str, prompt: int) -> int:
        """How many prompts it takes until no turn captures a graph again."""
        if self.result["machine"]["device"] == "CPU" or prompts_measure.WAYS.get(way, (None, False))[0] is None:
            return 0
        if way == "chunks" and prompt > self.chunk:
            return 1 + Progress.after // max(1, prompt // self.chunk - 1) if self.chunk <= MAX_FUSED else 0
        return Progress.after if prompt <= MAX_FUSED else 0

    def _numbers(self, way: str, count: int) -> list[int]:
        return [self._less(way, number) for number in range(count)]

    @staticmethod
    def _less(way: str, number: int) -> int:
        return SHORTER * number if way == "any_length" else 0

    def _read(self, way: str, prompt: int, **more: Any) -> Data:
        self._seed += 1
        run = self.peers[way]
        try:
            return run.tell(
                "read", f"{way} at {prompt}", way=way, prompt=max(1, prompt), seed=self._seed, chunk=self.chunk, **more
            )
        except Stopped as stopped:
            return {"error": str(stopped)}


def line(prompt: str, found: Data) -> str:
    """A length on one line: medians, quartiles, GiB."""
    said = []
    for way, data in found["summary"].items():
        peak = found["peak"].get(way)
        memory = "" if peak is None else f" +{peak:.2f} GiB"
        said.append(f"{way} {data['median']:.1f} ({data['quartiles'][0]:.1f} to {data['quartiles'][1]:.1f}){memory}")
    return f"{prompt:>6}: {', '.join(said)}"


def problems(result: Data) -> list[str]:
    """Captures in turns that should have had theirs."""
    if result["machine"]["device"] == "CPU":
        return []
    return [
        f"{way} at {prompt}: {number} captures in its turns"
        for prompt, found in result["lengths"].items()
        for way, number in found["captured"].items()
        if number
    ]


def started(
    result: Data, arguments: Any, work: Path, deadline: float, start: Callable[..., common.Worker], llama: Any
) -> tuple[dict[str, Run], list[Run]]:
    """The process of each way, with a model in it, and the processes."""
    ours = Run(result, arguments.out, deadline, lambda: start(True))
    bare = Run(result, arguments.out, deadline, lambda: start(False))
    runs: list[Run] = []
    peers: dict[str, Run] = {}
    for run, ways in ((ours, arguments.ways), (bare, ["upstream"] * ("upstream" in arguments.ways))):
        wanted = [way for way in ways if (way == "upstream") == (run is bare)]
        if run is bare and wanted and arguments.where != "gpu":
            result["not_run"].append(f"upstream ({WHERE[arguments.where]})")
            continue
        if run is bare and not wanted:
            continue
        runs.append(run)
        folder = work / ("bare" if run is bare else "ours")
        folder.mkdir()
        run.order = {"shape": arguments.shape, "folder": str(folder), "where": arguments.where}
        run.order["upstream"] = run is bare
        built = run.tell("build", "build")
        if run is ours:
            if "error" in built:
                raise SystemExit(f"the weights could not be built: {built['error']}")
            result.update(built)
        name = "upstream" if run is bare else "ours"
        result["load"][name] = run.tell("load", f"load, {name}")
        if "error" in result["load"][name]:
            continue
        run.keep(f"{name}: loaded in {result['load'][name]['load_s']:.0f} s")
        for way in wanted:
            if run is bare or run.tell("knows", f"{way}: is it there", way=way).get("known"):
                peers[way] = run
            else:
                result["not_run"].append(f"{way} (this version does not have it)")
    if arguments.llama_cpp and arguments.where == "gpu":
        peer = depth.peer_of(ours, arguments, work, llama)
        if peer is not None:
            runs.append(peer)
            room = max(arguments.lengths) + peers_llama.BATCH
            result["load"][LLAMA] = peer.tell("load", f"load, {LLAMA}", table="device", context=room)
            if "error" not in result["load"][LLAMA]:
                peers[LLAMA] = peer
    return peers, runs


def measured(arguments: Any, options: list[str], deadline: float) -> Data:
    script = Path(__file__)
    result = common.header(script, sys.modules[__name__], arguments.shape, options, arguments.note)
    result |= {"where": WHERE[arguments.where], "rounds": arguments.rounds, "chunk": arguments.chunk}
    result |= {"load": {}, "lengths": {}}
    folder = arguments.work or (None if arguments.where == EXPERTS else models.work_folder(arguments.shape))
    with (
        common.temporary("prompts-", folder) as work,
        common.workers(script, work) as start,
        common.temporary("logs-", work) as logs,
        common.workers(Path(peers_llama.__file__), logs) as start_peer,
    ):
        runs: list[Run] = []
        with contextlib.suppress(Stopped):
            peers, runs = started(result, arguments, work, deadline, start, start_peer)
            asked = Measured(result, peers, arguments.rounds, arguments.chunk)
            asked.wake(arguments.lengths[0])
            for prompt in arguments.lengths:
                began = time.monotonic()
                for run in runs:  # a part that takes longer is not run, and the next one is
                    run.deadline = min(deadline, began + 60 * arguments.part)
                asked.length(prompt)
                common.write(result, arguments.out)
                print(line(str(prompt), result["lengths"][str(prompt)]), flush=True)
        for run in runs:
            run.close()
        result["problems"] += problems(result)
        common.write(result, arguments.out)
    return result


def serve() -> int:
    """Be one of our processes; without a GPU a stand-in records."""
    import os

    import peft  # noqa: F401  (while events are torch's)
    import torch
    from transformers import Gemma4ForConditionalGeneration  # noqa: F401

    from gemma4_compat._graphs import recording
    from gemma4_compat._lab.stand_ins import tape

    stand_in = not torch.cuda.is_available() and os.environ.get("GEMMA4_COMPAT_DISABLE") != "all"
    with tape.standing_in(recording.RECORDERS) if stand_in else contextlib.nullcontext():
        return common.serve(prompts_measure.ACTIONS)


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__, sorted({*models.SHAPES, *experts_models.SHAPES}), minutes=6.0)
    parser.add_argument("--lengths", default="64,512,2048,8192,32768", help="tokens of a prompt")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)}")
    parser.add_argument("--where", default="gpu", choices=sorted(WHERE), help="where weights are (gpu)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way (5)")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a chunk (512)")
    parser.add_argument("--part", type=float, default=1.5, help="minutes for one length, at most (1.5)")
    parser.add_argument("--llama-cpp", type=Path, help="llama.cpp's tree, built, with heads of this shape's files")
    arguments = parser.parse_args(argv)
    if arguments.child:
        return serve()
    if arguments.shape is None:
        parser.error("--shape is required")
    if arguments.shape not in SHAPES[arguments.where]:
        parser.error(
            f"--shape {arguments.shape} with --where {arguments.where}: give one of {list(SHAPES[arguments.where])}"
        )
    deadline = time.monotonic() + 60 * arguments.minutes
    options = [option for option in common.shown(arguments) if option != str(arguments.llama_cpp)]
    if arguments.llama_cpp:
        options.insert(options.index("--llama-cpp") + 1, "TREE")
    common.chosen(parser, arguments, "ways", WAYS)
    arguments.lengths = sorted(map(int, arguments.lengths.split(",")))
    result = measured(arguments, options, deadline)
    return common.ended(result)


if __name__ == "__main__":
    sys.exit(main())
