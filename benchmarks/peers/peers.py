"""How do other ways to decode the same weights compare: upstream as it is and compiled, the shim, llama.cpp, Unsloth?

python benchmarks/peers/peers.py --shape E2B --out FILE.json
    [--llama-cpp TREE] [--peers A,B] [--parts answers,adapter,...]

Random weights in the real shape (no network), one prompt of random tokens, batch 1, greedy. One peer at a time, in a
process of its own, with nothing else on the card; upstream's processes run without the shim. Parts of a peer:

speed      (always) load time; seconds of the first call; then in several rounds the seconds to the first token and
           tokens a second after the first ones; what the card holds more than before the process started
answers    what it says of the prompt, against the same weights in bf16: what its precision costs, and that these are
           the same weights
profile    the kernels of its decoded tokens, by what they do: milliseconds, and how many (on a GPU); llama.cpp's in a
           process of its own, where they run one after another
adapter    a LoRA adapter on it: whether it loads, how long that takes, tokens a second
offload    half of the layers on the host (streamed, or computed there: as the peer does it), table and towers too

`--llama-cpp TREE` is llama.cpp's source tree, built with shared libraries into TREE/build/bin; the Python package
`llama_cpp` (llama-cpp-python) of that time declares its C API. Its converter makes a GGUF file of the same checkpoint,
with made-up tokens; its quantizer makes the others; "tool" is what its own llama-bench says of a file.

The file is written after every part. What could not be run is listed with the reason. Exit code 1: a peer with the
shim raised. `--shape tiny` runs on a CPU, too, and says nothing of speed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common
from benchmarks.common import Data, Order
from benchmarks.decoding import (
    measure,
    models,
)
from benchmarks.peers import (
    answers,
    report,
)
from benchmarks.peers import llama as peers_llama
from benchmarks.peers.models import FILES, Llama, write_tokenizer
from benchmarks.small_card.models import PROMPT

PARTS = ("answers", "profile", "adapter", "offload", "tool")
#: Tokens of a turn, and after how many of them tokens are counted: compiling and capturing come first.
TOKENS = {"plain": 24, "compiled": 100, "replayed": 100, "llama.cpp": 100}
SETTLED = {"plain": 1, "compiled": 5, "replayed": 5, "llama.cpp": 5}
TINY_TOKENS = 8
OFFLOAD_TOKENS = 12
#: llama.cpp's setting without which each kernel starts while the one before it runs (Hopper's programmatic dependent
#: launch): the times of all kernels are then more than a token takes, and say of none what it costs.
ONE_AFTER_ANOTHER = {"GGML_CUDA_PDL": "0"}
CONTEXT = 1024
#: Checkpoint and GGUF files, as a multiple of the checkpoint.
MADE = 3.0
#: No step of a peer may take longer; compiling a step takes more than 90.
LIMIT_S = 400
LLAMA = "llama.cpp"
UNSLOTH = "Unsloth"
NO_TIME = report.NO_TIME


@dataclass(frozen=True)
class Peer:
    """One way to decode.

    Attributes:
        software: whose.
        what: in words.
        way: how ``generate`` is called (see decoding/measure.py); :data:`LLAMA`: not at all.
        where: the placement (see decoding/models.py), or the GGUF file.
        shim: whether it is on.
        table: where llama.cpp has the per-layer table.
        whole: adapter and offload are tried, too.
    """

    software: str
    what: str
    way: str
    where: str
    shim: bool = False
    table: str = "host"
    whole: bool = False


#: In the order in which they run: with little time left the last ones are missing. Compiling takes minutes.
PEERS = {
    "shim": Peer("gemma4_compat", "4-bit, replayed", "replayed", "gpu", shim=True, whole=True),
    "upstream": Peer("transformers", "4-bit, as it is", "plain", "gpu", whole=True),
    "llama-q4_0": Peer(LLAMA, "Q4_0", LLAMA, "q4_0", table="device", whole=True),
    "llama-q8_0": Peer(LLAMA, "Q8_0", LLAMA, "q8_0", table="device"),
    "shim-host": Peer("gemma4_compat", "4-bit, replayed; table and towers on the host", "replayed", "host", shim=True),
    "llama-q4_0-host": Peer(LLAMA, "Q4_0, table on the host, as it does by itself", LLAMA, "q4_0"),
    "llama-q8_0-host": Peer(LLAMA, "Q8_0, table on the host, as it does by itself", LLAMA, "q8_0"),
    "upstream-bf16": Peer("transformers", "bf16, as it is", "plain", "bf16"),
    "llama-bf16": Peer(LLAMA, "bf16, table on the host, as it does by itself", LLAMA, "bf16"),
    "upstream-compiled": Peer("transformers", "bf16, static cache, compiled", "compiled", "bf16"),
    "unsloth": Peer(UNSLOTH, "4-bit, as it is", "plain", "gpu", whole=True),
}
#: Peers that are not measured, and why.
NOT_HAD = {
    "vLLM": "its wheel alone is larger than what can be carried to the GPU machine, which has no network",
    "SGLang": "its kernels' wheel alone is larger than what can be carried to the GPU machine, which has no network",
    "ONNX Runtime GenAI": "the wheel of the ONNX Runtime for CUDA that it runs on is larger than what can be carried "
    "to the GPU machine, which has no network",
}


#: What a peer's process runs, if not this file.
SCRIPTS = {LLAMA: peers_llama.__file__, UNSLOTH: str(Path(__file__).with_name("with_unsloth.py"))}

# In a worker of the transformers peers


def reference(order: Order) -> Data:
    """The prompt, and what the same weights in bf16 say of it."""
    measure.load(order | {"where": "bf16"})
    batch = models.text_prompt(measure.model(), PROMPT)
    answers.save(Path(order["folder"]), batch["input_ids"][0].tolist(), measure.logits(batch))
    return {}


def agree(order: Order) -> Data:
    """What it says of the prompt, against bf16."""
    found = measure.logits(models.text_prompt(measure.model(), PROMPT))
    return answers.compared(Path(order["folder"]), found)


ACTIONS = {
    "build": measure.build,
    "reference": reference,
    "load": measure.load,
    "adapt": measure.adapt,
    "turn": lambda order: measure.turn(order | {"tokens": order["count"]}),
    "agree": agree,
    "profile": measure.profiled,
    "free": measure.free,
}


# The parent


def card_gib() -> float | None:
    """What the card holds now, of everyone; None without one. Of several, the first that this process sees."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    if seen := os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]:
        query.append(f"--id={seen}")
    try:
        said = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20).stdout.split()
        return int(said[0]) / 1024 if said else None
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


class Run:
    """The result so far, the time that is left, and how to start processes."""

    def __init__(self, result: Data, arguments: Any, deadline: float, work: Path) -> None:
        self.result, self.arguments, self.deadline, self.work = result, arguments, deadline, work
        self.llama = Llama(arguments.llama_cpp) if arguments.llama_cpp else None
        self.converted: Data = {}
        result["gguf"] = self.converted

    def turn(self, peer: Peer) -> Order:
        """How a peer is asked for one answer."""
        tokens = min(TOKENS[peer.way], TINY_TOKENS) if self.arguments.shape.startswith("tiny") else TOKENS[peer.way]
        return {"way": peer.way, "count": tokens, "settled": SETTLED[peer.way]}

    def left(self) -> float:
        """Seconds until nothing more is started."""
        return self.deadline - time.monotonic()

    def keep(self, text: str) -> None:
        """Write the result so far, and say something."""
        common.write(self.result, self.arguments.out)
        print(text, flush=True)

    def convert(self, kind: str) -> str | None:
        """Have a GGUF file of this kind, and what it is made of; why not, if it cannot be had."""
        assert self.llama is not None
        for wanted in (FILES.get(kind), kind):
            if wanted is not None and wanted not in self.converted:
                try:
                    self.converted[wanted] = self.llama.convert(wanted, self.work, min(self.left(), LIMIT_S))
                except (RuntimeError, OSError) as error:
                    self.converted[wanted] = {"error": str(error)}
                self.keep(f"{wanted + '.gguf':<18} {self.converted[wanted]}")
            if wanted is not None and (failed := self.converted[wanted].get("error")):
                return f"{wanted}.gguf: {failed}"
        return None

    def missing(self, peer: Peer) -> str | None:
        """Why a peer cannot be run, if it cannot."""
        if self.left() <= 0:
            return NO_TIME
        if peer.software == UNSLOTH:
            return None if importlib.util.find_spec("unsloth") else "Unsloth is not installed"
        if peer.software != LLAMA:
            return None
        if self.llama is None:
            return "no --llama-cpp"
        if importlib.util.find_spec("llama_cpp") is None:
            return "llama-cpp-python is not installed"
        return self.llama.missing() or self.convert(peer.where)


class Steps:
    """The process of one peer; after an error the rest of a part is left out."""

    def __init__(self, run: Run, worker: common.Worker, order: Order) -> None:
        self.run, self.worker, self.order = run, worker, order

    def __call__(self, do: str, **more: Any) -> Data:
        """Its answer.

        Raises:
            RuntimeError: what it raised, or that it did not end.
        """
        left = min(self.run.left(), LIMIT_S)
        if left <= 0:
            raise RuntimeError(NO_TIME)
        try:
            found = self.worker({**self.order, "do": do, **more}, timeout=left)
        except SystemExit as error:  # it could not be started
            raise RuntimeError(str(error)) from None
        if (raised := found.pop("error")) is not None:
            raise RuntimeError(NO_TIME if raised.startswith("no end after") and left < LIMIT_S else raised)
        return found


@contextlib.contextmanager
def part(run: Run, entry: Data, name: str) -> Iterator[Data]:
    """A part of a peer's result; an error is kept in it. The file has it, too, as soon as it ends."""
    found = entry[name] = {}
    try:
        yield found
    except RuntimeError as error:
        found["error"] = str(error)
    except Exception as error:  # noqa: BLE001  (the other peers go on)
        found["error"] = f"{type(error).__name__}: {error}"[:300]
    except BaseException:
        found["error"] = "cut off"
        raise
    finally:
        common.write(run.result, run.arguments.out)


def measured_peer(run: Run, name: str, peer: Peer) -> None:
    entry: Data = {"software": peer.software, "what": peer.what, "shim": peer.shim}
    run.result["peers"][name] = entry
    wanted = run.arguments.parts
    if run.llama is not None:
        os.environ |= {peers_llama.LIBRARIES: str(run.llama.programs), "GGML_NO_BACKTRACE": "1"}
    script = Path(SCRIPTS.get(peer.software, __file__))
    before, began = card_gib(), time.monotonic()
    with common.workers(script, run.work) as start:
        steps = Steps(run, start(peer.shim), order_of(run, peer))
        turn = run.turn(peer)
        with part(run, entry, "speed") as found:
            found["load"] = steps("load")
            found["first"] = steps("turn", **turn)
            after = card_gib()
            found["card_gib"] = None if before is None or after is None else after - before
            found["rounds"] = []
            for _ in range(run.arguments.rounds):
                found["rounds"].append(steps("turn", **turn))
                found["summary"] = report.summary(found)
            run.keep(f"{name:<18} {found['summary']}")
        if "error" not in entry["speed"]:
            more_parts(run, peer, entry, steps, wanted)
    if "error" not in entry["speed"] and peer.software == LLAMA and "profile" in wanted:
        with common.workers(script, run.work) as start, part(run, entry, "profile") as found:
            steps = Steps(run, start(peer.shim, **ONE_AFTER_ANOTHER), order_of(run, peer))
            steps("load")
            found["environment"] = ONE_AFTER_ANOTHER
            found["tok_s"] = statistics.median(steps("turn", **turn)["tok_s"] for _ in range(run.arguments.rounds))
            found |= steps("profile", way=turn["way"], settled=turn["settled"])
    if run.llama is not None and peer.software == LLAMA and "tool" in wanted:
        with part(run, entry, "tool") as found:
            options = ["-ngl", "99", *(["-ot", "per_layer_token_embd=CUDA0"] if on_card(run, peer) else [])]
            file = run.work / f"{peer.where}.gguf"
            found |= run.llama.bench(file, options, run.work, min(run.left(), LIMIT_S))
    entry["wall_s"] = time.monotonic() - began
    failed = {key: data["error"] for key, data in entry.items() if isinstance(data, dict) and "error" in data}
    run.result["not_run"] += [f"{name} {key} (no time)" for key, error in failed.items() if error == NO_TIME]
    if peer.shim:
        run.result["problems"] += [f"{name}, {key}: {error}" for key, error in failed.items() if error != NO_TIME]
    run.keep(f"{name:<18} {entry['wall_s']:.0f} s; {failed or 'all parts'}")


def more_parts(run: Run, peer: Peer, entry: Data, steps: Steps, wanted: list[str]) -> None:
    """What is asked of a peer beside its speed."""
    turn = run.turn(peer)
    if "answers" in wanted:
        with part(run, entry, "answers") as found:
            found |= steps("agree")
    if "profile" in wanted and peer.software != LLAMA:
        with part(run, entry, "profile") as found:
            found |= steps("profile", way=turn["way"], settled=turn["settled"])
    if "adapter" in wanted and peer.whole:
        with part(run, entry, "adapter") as found:
            found |= steps("adapt", adapter=adapter_of(run, peer))
            found["first"] = steps("turn", **turn)
            found["tok_s"] = statistics.median(steps("turn", **turn)["tok_s"] for _ in range(2))
    if "offload" in wanted and peer.whole:
        with part(run, entry, "offload") as found:
            layers = run.result["layers"] // 2
            found["load_s"] = steps("load", where="half", layers=layers, table="host")["load_s"]
            short = turn | {"count": min(OFFLOAD_TOKENS, turn["count"]), "settled": 1}
            found["first"] = steps("turn", **short)
            found["tok_s"] = steps("turn", **short)["tok_s"]


def order_of(run: Run, peer: Peer) -> Order:
    """What every order to a peer's process says."""
    order: Order = {"shape": run.arguments.shape, "folder": str(run.work), "tokens": TOKENS}
    if peer.software == LLAMA:
        file, threads = run.work / f"{peer.where}.gguf", os.cpu_count() or 1
        context = 256 if run.arguments.shape.startswith("tiny") else CONTEXT
        order |= {"file": str(file), "layers": -1, "table": peer.table, "context": context, "threads": threads}
        order["gpu"] = run.result["machine"]["device"] != "CPU"
        return order
    return order | {"where": peer.where, "upstream": not peer.shim}


def on_card(run: Run, peer: Peer) -> bool:
    return peer.table == "device" and run.result["machine"]["device"] != "CPU"


def adapter_of(run: Run, peer: Peer) -> str:
    """The adapter as the peer reads it.

    Raises:
        RuntimeError: it could not be converted.
    """
    if peer.software != LLAMA:
        return str(run.work / "adapter")
    if error := run.convert("lora"):
        raise RuntimeError(error)
    return str(run.work / "lora.gguf")


def build(run: Run) -> None:
    """The checkpoint, the prompt and what bf16 says of it."""
    with common.workers(Path(__file__), run.work) as start:
        steps = Steps(run, start(True), order_of(run, PEERS["shim"]))
        try:
            run.result.update(steps("build"))
            text = models.config_of(run.work).get_text_config()
            run.result["layers"] = text.num_hidden_layers
            write_tokenizer(run.work / "checkpoint")
            run.keep(f"built in {run.result['build_s']:.0f} s")
            steps("reference", where="bf16")
        except RuntimeError as error:
            raise SystemExit(f"the checkpoint could not be built: {error}") from None


def measured(arguments: Any, options: list[str], deadline: float) -> Data:
    script = Path(__file__)
    result = common.header(script, sys.modules[__name__], arguments.shape, options, arguments.note)
    settings = {"tokens": TOKENS, "settled": SETTLED, "prompt": PROMPT, "context": CONTEXT}
    result |= {"settings": settings, "peers": {}, "not_had": NOT_HAD}
    times = MADE if arguments.llama_cpp else 1.15
    folder = arguments.work or models.work_folder(arguments.shape, times=times)
    with common.temporary("peers-", folder) as work:
        run = Run(result, arguments, deadline, work)
        build(run)
        for name, peer in PEERS.items():
            if name not in arguments.peers:
                continue
            if reason := run.missing(peer):
                result["not_run"].append(f"{name} ({reason})")
                run.keep(f"{name:<18} not run: {reason}")
                continue
            measured_peer(run, name, peer)
    return result


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__, sorted(models.SHAPES), minutes=9.0)
    parser.add_argument("--llama-cpp", type=Path, help="llama.cpp's source tree, built into build/bin")
    parser.add_argument("--peers", default=",".join(PEERS), help=f"of {', '.join(PEERS)}")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"beside speed, of {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each peer (5)")
    arguments = parser.parse_args(argv)
    if arguments.child:
        return common.serve(ACTIONS)
    if arguments.shape is None:
        parser.error("--shape is required")
    deadline = time.monotonic() + 60 * arguments.minutes
    options = [option for option in common.shown(arguments) if option != str(arguments.llama_cpp)]
    if arguments.llama_cpp:
        options.insert(options.index("--llama-cpp") + 1, "TREE")
    for option, known in (("peers", tuple(PEERS)), ("parts", PARTS)):
        common.chosen(parser, arguments, option, known)
    result = measured(arguments, options, deadline)
    print(f"\n{report.table(result)}")
    return common.ended(result)


if __name__ == "__main__":
    sys.exit(main())
