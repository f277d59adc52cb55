"""What does a QLoRA step take, in time and VRAM, with parts of the base on the host, with the loss in chunks, with
8-bit and paged optimizers; and is that what `plan_training` said?

python benchmarks/training/training.py --shape E2B --out FILE.json
    [--where host,half,streamed,gpu] [--sequences 512,2048] [--kinds chunked,plain,pieces] [--tokens 2048]
    [--offload]

Random weights in the real shape (no network), 4-bit with double quantization, LoRA of rank 16 on every linear layer of
the decoder, checkpointing without reentry, bf16 autocast: the script that a plan writes. Parts:

steps       for each placement, sequence and kind, the loss plain, in chunks ("chunked"), or in chunks with MLPs in
            pieces ("pieces"): seconds of a step after the first ones, tokens a second, what is copied of streamed
            layers, the VRAM peak, the planner's, and the losses, which must be those of the other placements, bit by
            bit; those of "pieces" may differ from those of "chunked" by rounding
optimizers  with the first placement, the shortest sequence and the loss in chunks: the same for each optimizer
out         what does not fit or raises is a result, and not the end

The file is written after every measurement. Nothing starts that would end after `--minutes`; a part that takes longer
is ended. `--offload` keeps what checkpointing keeps in host memory (transformers 5.17). Exit code 1: something raised,
losses differ between placements, or a plan is off by more than 5 %. `--tiny` is `--shape tiny` with short sequences,
for a CPU: then memory is not measured.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gemma4_compat  # noqa: F401  (before the others)
from benchmarks import common
from benchmarks.common import Data, Order
from benchmarks.decoding import models
from benchmarks.small_card import device
from benchmarks.small_card.measure import planned_use
from benchmarks.training import training_report

PLACES = ("host", "half", "streamed", "gpu")
#: By kind of step: whether the loss is in chunks, and whether MLPs are in pieces.
KINDS = {"chunked": (True, False), "plain": (False, False), "pieces": (True, True)}
OPTIMIZERS = ("adamw_torch", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit")
RANK = 16
#: Steps before those that are timed, and how many of these.
SETTLED, STEPS = 1, 3
#: Of a peak, how far a plan may be off.
BOUND = 0.05
#: What a process may take beyond the deadline before it is ended.
GRACE_S = 10

_model: Any = None
_initial: dict[str, Any] = {}
_adapted_gib: float | None = None


# In the process that has the model


def build(order: Order) -> Data:
    return models.build(order["shape"], Path(order["folder"]))


def load(order: Order) -> Data:
    """A base in place of the one before, and LoRA on it, whose weights are the same in every placement."""
    import torch
    from peft import LoraConfig, get_peft_model

    from gemma4_compat._plan.training_step import TARGETS

    global _model, _initial
    _model, _initial = None, {}
    device.forget_peak()
    started = time.perf_counter()
    model = models.load(order["where"], Path(order["folder"])).requires_grad_(False)
    device.synchronize()
    found = {"load_s": time.perf_counter() - started, "load": device.memory()}
    rank = min(RANK, order["rank"])
    _model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=rank, target_modules=TARGETS)).train()
    common.checkpointing(_model, offload=order["offload"])
    _model.enable_input_require_grads()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in sorted(_trained().items()):
            _initial[name] = torch.empty(weight.shape).normal_(0.0, 0.02, generator=generator)
            weight.data = weight.data.float()
    return found | {"trained": sum(weight.numel() for weight in _trained().values())}


def _trained() -> dict[str, Any]:
    return {name: weight for name, weight in _model.named_parameters() if weight.requires_grad}


def _optimizer(name: str, weights: list[Any]) -> Any:
    import bitsandbytes as bnb
    import torch

    kinds = {
        "adamw_torch": torch.optim.AdamW,
        "adamw_8bit": bnb.optim.AdamW8bit,
        "paged_adamw_8bit": bnb.optim.PagedAdamW8bit,
        "paged_adamw_32bit": bnb.optim.PagedAdamW,
    }
    return kinds[name](weights, lr=1e-4)


@contextlib.contextmanager
def _copied() -> Iterator[Data]:
    """How many module groups of streamed layers are copied to the device, and their bytes."""
    from gemma4_compat._offload.transfer.module_groups import ModuleGroup

    found = {"groups": 0, "bytes": 0}
    copy = ModuleGroup.copy_from_host

    def counted(self: Any) -> None:
        found["groups"] += 1
        found["bytes"] += self.size
        copy(self)

    ModuleGroup.copy_from_host = counted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        ModuleGroup.copy_from_host = copy  # type: ignore[method-assign]


def train(order: Order) -> Data:
    """Steps of one kind, from the same weights and the same data each time."""
    import torch

    chunked, pieces = KINDS[order["kind"]]
    common.parts(_model, loss=chunked, mlp=pieces and order["tokens"])
    trained = _trained()
    with torch.no_grad():
        for name, weight in trained.items():
            weight.copy_(_initial[name])
            weight.grad = None
    optimizer = _optimizer(order["optimizer"], list(trained.values()))
    vocabulary = _model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, min(250_000, vocabulary - 16), (1, order["sequence"]), generator=generator)
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    batch = {name: value.to(device.main_device()) for name, value in batch.items()}
    losses: list[str] = []
    kind = "cuda" if device.main_device() != "cpu" else "cpu"

    def step() -> None:
        with torch.autocast(kind, dtype=torch.bfloat16):
            loss = _model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(f"{loss.item():.9g}")  # every bit: numbers are rounded in the result

    device.forget_peak()
    try:
        seconds = []
        for number in range(SETTLED + STEPS):
            if number == SETTLED:
                device.forget_peak()
            device.synchronize()
            started = time.perf_counter()
            step()
            device.synchronize()
            seconds.append(time.perf_counter() - started)
        found = {"seconds": seconds[SETTLED:], "first_s": seconds[0], "memory": device.memory()}
        with _copied() as copied:
            step()
        copies = {"copied_groups": copied["groups"], "copied_gib": copied["bytes"] / device.GIB}
        return found | {"losses": losses, **copies}
    finally:
        gc.collect()


def free(_: Order) -> Data:
    """What a failed step has left."""
    for weight in _trained().values():
        weight.grad = None
    device.forget_peak()
    return {}


# In the process that plans


def plan(order: Order) -> Data:
    """What `plan_training` expects of a step, and the planner of it with the placement that is measured, in GiB."""
    from gemma4_compat._gemma4.models import build as built
    from gemma4_compat._gemma4.quantization import config
    from gemma4_compat._plan import training_step
    from gemma4_compat._training import mlp

    mlp.TOKENS = order["tokens"]
    folder = Path(order["folder"])
    model = built.on_meta(str(folder / "checkpoint"))[0]
    names = config.linear_names(model, models.skipped(folder))
    chunked, pieces = KINDS[order["kind"]]
    step = training_step.Step(
        max_length=order["sequence"],
        padding=False,
        r=min(RANK, order["rank"]),
        chunked_loss=chunked,
        chunked_mlp=pieces,
        activation_offloading=order["offload"],
    )
    memory = training_step.measure(model, names, step)
    peaks: Data = {}
    for optimizer in OPTIMIZERS:
        wanted = memory.with_optimizer(optimizer)
        peaks[optimizer] = {"step": wanted.peak / device.GIB}
        for where in order["places"]:
            use = planned_use(
                folder,
                models.device_map(where, folder),
                quantization="4bit-double",
                skip=models.skipped(folder),
                adapter=False,
                quantize_offloaded=True,
                training=wanted.peak,
            )(order["sequence"], order["sequence"])
            peaks[optimizer][where] = use.prefill / device.GIB
    return {"peaks": peaks}


ACTIONS = {"build": build, "load": load, "train": train, "free": free, "plan": plan}


# In the process that asks


class Run:
    """The processes, what they are told, and the result so far."""

    def __init__(self, arguments: Any, result: Data, work: Path, start: Any) -> None:
        self.arguments, self.result, self.start = arguments, result, start
        self.deadline = time.monotonic() + 60 * arguments.minutes
        self.order = {"shape": arguments.shape, "folder": str(work), "rank": arguments.rank}
        self.order |= {"offload": arguments.offload, "tokens": arguments.tokens}
        self.worker: common.Worker | None = None
        self.took: dict[str, float] = {}

    def tell(self, do: str, name: str, **more: Any) -> Data | None:
        """The answer; None where there is no time for it, or it raised, which is kept."""
        left = self.deadline - time.monotonic()
        kind = f"{do} {more.get('sequence')}"
        if left <= self.took.get(kind, 0.0):
            self.result["not_run"].append(name)
            return None
        self.worker = self.worker or self.start(True)
        began = time.monotonic()
        found = self.worker({**self.order, "do": do, **more}, timeout=left + GRACE_S)
        self.took[kind] = max(self.took.get(kind, 0.0), time.monotonic() - began)
        error = found.pop("error")
        if error is None:
            return found
        self.result["out"][name] = error
        if "OutOfMemoryError" not in error:
            self.result["problems"].append(f"{name}: {error}")
        if self.worker.process.poll() is not None:
            self.worker = None
        return None

    def keep(self, text: str) -> None:
        """Write the result so far, and say something."""
        common.write(self.result, self.arguments.out)
        print(text, flush=True)


def measured(arguments: Any, options: list[str]) -> Data:
    result = common.header(Path(__file__), sys.modules[__name__], arguments.shape, options, arguments.note)
    result |= {"settings": {"rank": arguments.rank, "steps": STEPS}, "steps": {}, "optimizers": {}, "out": {}}
    result["plans"] = {}
    folder = arguments.work or models.work_folder(arguments.shape)
    with common.temporary("training-", folder) as work, common.workers(Path(__file__), work) as start:
        run = Run(arguments, result, work, start)
        built = run.tell("build", "build")
        if built is None:
            raise SystemExit(f"the checkpoint could not be built: {result['out']}")
        result.update(built)
        run.keep(f"built in {built['build_s']:.0f} s")
        for place in arguments.where:
            placed(run, place)
        planned(run)
        result["problems"] += problems(result)
        run.keep("done")
    return result


def placed(run: Run, place: str) -> None:
    """Every step of one placement; the first one has the optimizers, too."""
    loaded = run.tell("load", f"{place}: load", where=place)
    if loaded is None:
        return
    entry = run.result["steps"][place] = {"what": models.WHERE[place], **loaded, "cells": {}}
    kinds = [(sequence, kind) for sequence in run.arguments.sequences for kind in run.arguments.kinds]
    for sequence, chosen in kinds:
        name = f"{sequence} {chosen}"
        kind = {"sequence": sequence, "kind": chosen}
        found = run.tell("train", f"{place} {name}", optimizer="adamw_torch", **kind)
        if found is None:
            if run.worker is None:  # the process has died with the model
                return
            run.tell("free", f"{place}: free")
            continue
        if place == run.arguments.where[0] and len(run.arguments.where) > 1:
            repeated = run.tell("train", f"{place} {name} again", optimizer="adamw_torch", **kind)
            found["losses_again"] = [] if repeated is None else repeated["losses"]
        entry["cells"][name] = found | kind | {"chunked": KINDS[chosen][0]}
        run.keep(line(f"{place} {name}", sequence, found))
    if place == run.arguments.where[0]:
        for optimizer in run.arguments.optimizers:
            kind = {"sequence": min(run.arguments.sequences), "kind": "chunked", "optimizer": optimizer}
            found = run.tell("train", f"{place} {optimizer}", **kind)
            if found is not None:
                run.result["optimizers"][optimizer] = found | kind | {"chunked": True, "where": place}
                run.keep(line(f"{place} {optimizer}", kind["sequence"], found))


def planned(run: Run) -> None:
    """The plans of what was measured, in the same process, which has no model any more."""
    if run.worker is not None:
        run.worker.close()
        run.worker = None
    for sequence in run.arguments.sequences:
        for kind in run.arguments.kinds:
            name = f"{sequence} {kind}"
            given = {"sequence": sequence, "kind": kind, "places": run.arguments.where}
            found = run.tell("plan", f"plan {name}", **given)
            if found is None:
                continue
            run.result["plans"][name] = found["peaks"]
            for place, entry in run.result["steps"].items():
                if name in entry["cells"]:
                    compare(entry["cells"][name], found["peaks"]["adamw_torch"][place])
            for optimizer, cell in run.result["optimizers"].items():
                if (cell["sequence"], cell["kind"]) == (sequence, kind):
                    compare(cell, found["peaks"][optimizer][cell["where"]])
            run.keep(f"planned {name}")


def compare(cell: Data, planned_gib: float) -> None:
    cell["planned_gib"] = planned_gib
    peak = cell["memory"]["peak_gib"]
    if peak is not None:
        cell["planned_by_measured"] = planned_gib / peak


def line(name: str, sequence: int, found: Data) -> str:
    median = statistics.median(found["seconds"])
    peak = found["memory"]["peak_gib"]
    held = "" if peak is None else f", {peak:.2f} GiB at most, {found['copied_gib']:.2f} GiB copied"
    return f"{name}: {median:.3f} s a step, {sequence / median:.0f} tokens a second{held}"


def problems(result: Data) -> list[str]:
    """Losses of one kind of step that are not the same in every placement; plans that are off.

    PyTorch's backward passes on GPUs need not give the same bits twice. So losses are compared up to where the first
    placement's own losses are not the same again.
    """
    found = []
    kinds = {name for entry in result["steps"].values() for name in entry["cells"]}
    for name in sorted(kinds):
        losses = {
            place: entry["cells"][name]["losses"] for place, entry in result["steps"].items() if name in entry["cells"]
        }
        first = next(iter(losses))
        again = result["steps"][first]["cells"][name].get("losses_again", [])
        same = [one == other for one, other in zip(losses[first], again)]
        steps = max(1, same.index(False) if False in same else len(same))  # the first one needs no gradient
        result.setdefault("compared", {})[name] = steps
        found += [
            f"{name}: losses with {place} are not those with {first}"
            for place, values in losses.items()
            if values[:steps] != losses[first][:steps]
        ]
    cells = {
        f"{place} {name}": cell for place, entry in result["steps"].items() for name, cell in entry["cells"].items()
    } | result["optimizers"]
    for name, cell in cells.items():
        ratio = cell.get("planned_by_measured")
        if ratio is not None and abs(ratio - 1) > BOUND:
            found.append(f"{name}: the plan is {ratio:.2f} of the measured peak")
    return found


def main(argv: list[str] | None = None) -> int:
    parser = common.parser(__doc__, sorted(models.SHAPES), minutes=3.5)
    parser.add_argument("--tiny", action="store_true", help="--shape tiny --sequences 16,32, for a CPU")
    parser.add_argument("--where", default=",".join(PLACES), help=f"of {', '.join(PLACES)}")
    parser.add_argument("--sequences", default="512,2048", help="tokens of a sequence")
    parser.add_argument("--kinds", default="chunked,plain", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--tokens", type=int, default=2048, help="of a piece of the MLPs, at most")
    parser.add_argument("--offload", action="store_true", help="keep checkpoints in host memory")
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS[1:]), help=f"of {', '.join(OPTIMIZERS)}")
    parser.add_argument("--rank", type=int, default=RANK)
    arguments = parser.parse_args(argv)
    if arguments.child:
        return common.serve(ACTIONS)
    if arguments.tiny:
        arguments.shape, arguments.sequences = "tiny", "16,32"
    if arguments.shape is None:
        parser.error("--shape is required")
    options = common.shown(arguments)
    for option, known in (("where", PLACES), ("kinds", tuple(KINDS)), ("optimizers", OPTIMIZERS)):
        common.chosen(parser, arguments, option, known)
    arguments.sequences = [int(number) for number in arguments.sequences.split(",")]
    result = measured(arguments, options)
    print(f"\n{training_report.table(result)}")
    for name, error in result["out"].items():
        print(f"{name}: {error}")
    return common.ended(result)


if __name__ == "__main__":
    sys.exit(main())
