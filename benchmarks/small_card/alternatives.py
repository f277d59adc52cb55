"""What would somebody pick instead of the shim to run Gemma 4 in 4-bit with an adapter on a small card, and what does
each choice cost?

python benchmarks/small_card/alternatives.py --shape E2B|E4B --out FILE.json [--minutes N] [--only A,B]

Random weights in the real shape (no network), 4-bit with double quantization, towers in bf16 unless a case says
otherwise; the adapter is rank-16 LoRA on every linear of the language model and both towers. Each case runs in a
process of its own, upstream as it is or with the shim. Two processes that hold the model on the GPU, without and with
the adapter, stay alive: the speed of a case is taken in turns with the one that has what the case has, and is a share
of it (the best turn of each). Answers (three forwards on text, one on an image, a greedy generate) are compared with
those of the same weights on the GPU: same quantization, same layers left in bf16, same adapter. A crash is a result,
told in its own words.

Exit code 1: a case with the shim raised, or its outputs differ.

`--shape tiny` runs without a GPU, too: the main device is then the CPU, and "disk" the place of what is offloaded.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common
from benchmarks.common import Data, Order
from benchmarks.small_card import cases as small_card_cases
from benchmarks.small_card import device as small_card_device
from benchmarks.small_card import models as small_card_models
from benchmarks.small_card.cases import EVERYTHING, Case

#: Tokens of the answers and of a turn; of a turn where a token takes longer than SLOW_MS.
ANSWER_TOKENS = 12
TURN_TOKENS = 16
SLOW_TOKENS = 4
SLOW_MS = 300
TURNS = 3
PREFILL = 512
SPLIT = ("table", "towers")
WHOLE, ADAPTED = "gpu", "gpu-linear"


@dataclass(frozen=True)
class Choice:
    """One way to go.

    Attributes:
        what: in words.
        case: placement and quantization, and whether the shim is on (``who`` "ours").
        adapter: None, "names" (targets as a user writes them) or "linear" (inner linears by their full names).
        reference: the choice with whose answers these must agree; None: it is one.
        timed: it is timed, not only asked for answers.
    """

    what: str
    case: Case
    adapter: str | None = None
    reference: str | None = None
    timed: bool = True


def _choice(who: str, what: str, *offload: str, **rest: Any) -> Choice:
    own = {name: rest.pop(name) for name in ("adapter", "reference", "timed") if name in rest}
    return Choice(what, Case(who, what, offload, **rest), **own)


#: In the order in which they run: with little time left the last ones are missing.
CHOICES: dict[str, Choice] = {
    WHOLE: _choice("upstream", "all on the GPU, towers kept out of quantization"),
    ADAPTED: _choice("upstream", "the same, adapter that targets `.linear` by hand", adapter="linear"),
    "upstream-split": _choice(
        "upstream", "table and towers on the CPU, adapter", *SPLIT, adapter="names", reference=ADAPTED
    ),
    "upstream-split-linear": _choice(
        "upstream",
        "table and towers on the CPU, adapter that targets `.linear` by hand",
        *SPLIT,
        adapter="linear",
        reference=ADAPTED,
    ),
    "ours-split": _choice("ours", "table and towers on the CPU, adapter", *SPLIT, adapter="names", reference=ADAPTED),
    "ours-paged": _choice(
        "ours",
        "table, towers and all layers on the CPU, adapter",
        *EVERYTHING,
        quantize=True,
        adapter="names",
        reference=ADAPTED,
    ),
    "gpu-bf16-layers": _choice("upstream", "half of the layers in bf16", unquantized="layers-half", timed=False),
    "upstream-layers": _choice(
        "upstream", "half of the layers on the CPU, there in bf16", "layers-half", reference="gpu-bf16-layers"
    ),
    "gpu-towers": _choice("ours", "towers quantized", quantize_towers=True, timed=False),
    "ours-towers": _choice(
        "ours", "towers quantized, table on the CPU", "table", quantize_towers=True, reference="gpu-towers"
    ),
    "upstream-towers": _choice(
        "upstream", "all on the GPU, towers quantized", quantize_towers=True, reference="gpu-towers"
    ),
}


# In a worker

_model: Any = None


def build(order: Order) -> Data:
    """The checkpoint and the adapters."""
    return small_card_models.build(order["shape"], Path(order["folder"]), everywhere=True)


def prepare(order: Order) -> Data:
    """Load what the case says."""
    global _model
    choice = CHOICES[order["choice"]]
    small_card_device.forget_peak()
    started = time.perf_counter()
    _model = small_card_models.load(order["shape"], choice.case, Path(order["folder"]))
    small_card_device.synchronize()
    return {"load_s": time.perf_counter() - started, **_held()}


def adapt(order: Order) -> Data:
    """Load the adapter."""
    global _model
    from peft import PeftModel

    folder = "adapter" if CHOICES[order["choice"]].adapter == "names" else "adapter-linear"
    small_card_device.forget_peak()
    started = time.perf_counter()
    _model = PeftModel.from_pretrained(_model, Path(order["folder"]) / folder).eval()
    small_card_device.synchronize()
    return {"adapter_load_s": time.perf_counter() - started, **_held()}


def _held() -> Data:
    places = {"towers": ("vision_tower", "audio_tower"), "table": ("embed_tokens_per_layer",), "layers": (".layers.",)}
    parameters = [(name, value.device.type) for name, value in _model.named_parameters() if "lora_" not in name]
    on = {}
    for part, words in places.items():
        inside = [
            device
            for name, device in parameters
            if any(word in name for word in words) and (part != "layers" or "language_model" in name)
        ]
        on[part] = {device: inside.count(device) for device in sorted(set(inside))}
    return {"on": on, **small_card_device.memory()}


def answer(order: Order) -> Data:
    """Ask it; compare with the reference, or be one."""
    import torch

    from gemma4_compat._lab.workspace import difference

    choice, folder = CHOICES[order["choice"]], Path(order["folder"])
    small_card_device.forget_peak()
    with torch.no_grad():
        seen, clock = small_card_models.outputs(_model, ANSWER_TOKENS)
        found: Data = {"ms_a_token": 1000 / clock.tokens_per_second}
        if choice.reference is None:
            torch.save(seen, folder / f"{order['choice']}.pt")
        else:
            reference = torch.load(folder / f"{choice.reference}.pt", weights_only=False)
            found["parity"] = difference(reference, seen)
            found["same_tokens"] = bool(torch.equal(reference.tokens, seen.tokens))
            found["logits_differ_by"] = max(float((a - b).abs().max()) for a, b in zip(reference.logits, seen.logits))
    return found | _held()


def prefill(order: Order) -> Data:
    """Milliseconds of a prefill, the second of two, and its peak."""
    import torch

    small_card_device.forget_peak()
    ids = small_card_models.prompt(_model, 64 if order["shape"] == "tiny" else PREFILL)
    with torch.no_grad():
        seconds, _ = small_card_device.timed(lambda: _model(input_ids=ids, logits_to_keep=1), runs=1)
    return {"ms": 1000 * seconds, **small_card_device.memory()}


def turn(order: Order) -> Data:
    """Tokens a second."""
    import torch

    with torch.no_grad():
        return {"tok_s": small_card_models.generate(_model, order["tokens"])[1].tokens_per_second}


# The parent


def run(name: str, worker: common.Worker, beside: common.Worker | None, order: Data, note: Callable[[], None]) -> Data:
    """One choice: what it needs, what it answers, how fast it is beside the reference of its kind.

    ``note`` is called when it is loaded: the next process may start its imports.
    """
    choice = CHOICES[name]
    entry: Data = {"what": choice.what, "who": choice.case.who, "adapter": choice.adapter, "error": None}
    order = {**order, "choice": name}
    steps = ["prepare", *(["adapt"] if choice.adapter else []), "answer", *(["prefill"] if choice.timed else [])]
    for step in steps:
        entry[step] = worker({**order, "do": step})
        if entry[step]["error"] is not None:
            entry["error"] = entry[step]["error"]
            entry["failed_in"] = step
            return entry
        if step == "prepare":
            note()
    peaks = [entry[step]["peak_gib"] for step in steps]
    entry["peak_gib"] = None if None in peaks else max(peaks)
    entry["resident_gib"] = entry["answer"]["resident_gib"]
    if choice.timed:
        worker.wait()
        tokens = SLOW_TOKENS if entry["answer"]["ms_a_token"] > SLOW_MS else TURN_TOKENS
        own = {**order, "do": "turn", "tokens": tokens}
        reference = {**order, "do": "turn", "tokens": TURN_TOKENS}
        turns = []
        for _ in range(TURNS):
            pair = [beside(reference) if beside is not None else None, worker(own)]
            turns.append([said.get("tok_s") if said is not None else None for said in pair])
        entry["tok_s_of_turns"] = turns
        best = [max((value for value in values if value is not None), default=None) for values in zip(*turns)]
        entry["tok_s"] = best[1]
        if best[0] is not None and best[1] is not None:
            entry["share"] = best[1] / best[0]
        elif beside is None:
            entry["share"] = 1.0
    return entry


def problems(choices: Data) -> list[str]:
    """What the shim promises and did not keep, and references that failed."""
    found = []
    for name, entry in choices.items():
        if entry["error"] is not None and (entry["who"] == "ours" or CHOICES[name].reference is None):
            found.append(f"{name}: {entry['error']}")
        elif entry["who"] == "ours" and entry.get("answer", {}).get("parity", 0.0) != 0.0:
            found.append(f"{name}: outputs differ by {entry['answer']['parity']}")
    return found


def text(name: str, entry: Data) -> str:
    if entry["error"] is not None:
        return f"{name:<22} {entry['error'][:120]}  ({entry['wall_s']:.0f} s)"
    held = "" if entry["peak_gib"] is None else f"{entry['resident_gib']:.2f}/{entry['peak_gib']:.2f} GiB  "
    speed = f"{entry['tok_s']:.2f} tok/s, share {entry.get('share', 0.0):.3f}  " if "tok_s" in entry else ""
    parity = f"parity {entry['answer']['parity']}  " if "parity" in entry["answer"] else ""
    return f"{name:<22} {held}{speed}{parity}({entry['wall_s']:.0f} s)"


def selected(wanted: list[str]) -> list[str]:
    """These choices and what they are compared with, in the order of :data:`CHOICES`."""
    names = {WHOLE, ADAPTED, *wanted} | {CHOICES[name].reference for name in wanted}
    return [name for name in CHOICES if name in names]


def measure(
    shape: str,
    wanted: list[str],
    *,
    out: Path | None,
    minutes: float,
    folder: Path | None,
    options: list[str],
    note: str | None,
) -> Data:
    """Build, and run the choices until the time is up; ``out`` is written after each one."""
    script = Path(__file__)
    deadline = time.monotonic() + 60 * minutes
    result = common.header(script, sys.modules[__name__], shape, options, note)
    result["settings"] = {"answer_tokens": ANSWER_TOKENS, "turn_tokens": TURN_TOKENS, "turns": TURNS}
    result["choices"] = {}
    with (
        common.temporary("alternatives-", folder or small_card_models.work_folder(shape)) as work,
        common.workers(script, work) as start,
    ):
        order = {"shape": shape, "folder": str(work)}
        builder = start(True)
        names = selected(wanted)
        ready: dict[str, common.Worker] = {}

        def have(name: str | None) -> None:
            if name is not None and name not in ready:
                ready[name] = start(CHOICES[name].case.who == "ours")

        have(names[0])
        built = builder({"do": "build", **order})
        builder.close()
        if built["error"] is not None:
            raise SystemExit(f"the checkpoint could not be built: {built['error']}")
        result |= {key: value for key, value in built.items() if key != "error"}
        kept: dict[str, common.Worker] = {}
        longest = 0.0
        for name, following in zip(names, [*names[1:], None]):
            if time.monotonic() + 0.8 * longest > deadline:
                result["not_run"].append(name)
                continue
            began = time.monotonic()
            have(name)
            choice = CHOICES[name]
            beside = None
            if name not in (WHOLE, ADAPTED):
                beside = kept.get(ADAPTED if choice.adapter else WHOLE)
            entry = run(name, ready[name], beside, order, lambda following=following: have(following))
            longest = max(longest, time.monotonic() - began)
            entry["wall_s"] = time.monotonic() - began
            result["choices"][name] = entry
            if name in (WHOLE, ADAPTED) and entry["error"] is None:
                kept[name] = ready[name]
            else:
                ready[name].close()
            result["problems"] = problems(result["choices"])
            common.write(result, out)
            print(text(name, entry), flush=True)
            if name == ADAPTED and len(kept) < 2:
                result["not_run"] = names[2:]
                break  # nothing to compare with
        common.write(result, out)
    return result


ACTIONS: dict[str, Callable[[Order], Data]] = {
    "build": build,
    "prepare": prepare,
    "adapt": adapt,
    "answer": answer,
    "prefill": prefill,
    "turn": turn,
}


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__, sorted(small_card_cases.SHAPES), minutes=3.0)
    parser.add_argument("--only", help=f"these choices, separated by commas; all: {', '.join(CHOICES)}")
    arguments = parser.parse_args(argv)
    if arguments.child:
        return common.serve(ACTIONS)
    if arguments.shape is None:
        parser.error("--shape is required")
    wanted = arguments.only.split(",") if arguments.only else list(CHOICES)
    if unknown := [name for name in wanted if name not in CHOICES]:
        parser.error(f"unknown choices: {', '.join(unknown)}")
    result = measure(
        arguments.shape,
        wanted,
        out=arguments.out,
        minutes=arguments.minutes,
        folder=arguments.work,
        options=common.shown(arguments),
        note=arguments.note,
    )
    return common.ended(result)


if __name__ == "__main__":
    sys.exit(main())
