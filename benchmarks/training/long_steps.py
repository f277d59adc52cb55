"""Does a training step of a long sequence fit a small card, how fast is it, and which bits does each switch change?

python benchmarks/training/long_steps.py --shape E4B --sequences 16384,32768 --budget 6,8,12 --json FILE.json
    [--where streamed] [--ways chunked,mlp,pieces,offload,windows,all] [--bits 16384] [--seconds 150]

QLoRA of rank 16 on every linear layer of the decoder, random weights in the real shape, 4-bit with double
quantization, checkpointing without reentry, bf16 autocast, AdamW, one process, no padding. Each way has all switches
before it; "windows" has no "offload", and "all" has both:

chunked     the loss in chunks, which is what there was
mlp         MLPs in pieces
pieces      norms in pieces too, and no graph that nobody reads: all of `mlp=True`
offload     what checkpointing keeps is in host memory
windows     `windows=True, products=True`
all         both: windows, and what checkpointing keeps in host memory

For each sequence and way: seconds of a step after the first one, tokens a second, PyTorch's peaks, the loss of each
step. A budget fits where the peak of reserved memory does, and does not where that of tensors does not. Between the
two a ballast tensor leaves so much (GiB) to this process's tensors, and a step decides.

`--bits N`: one step of N tokens from the same weights for each way, with kernels that are deterministic where PyTorch
has them (attention of wide heads is not): is the loss that of the way before, bit for bit, how many of the gradients
are, and how far are the others, of the norm of them all? "again" repeats the first way.

`--where experts` with `--shape 26B-A4B`: its experts in host memory. What is not started within `--seconds` is left
out; the file is written after every measurement. `python benchmarks/training/long_steps.py --plan FILE.json` adds the
planner's peaks to a result, without a GPU. Exit code 1: something raised that is no lack of memory, a loss is not
finite, or "pieces", "offload" or "all" changes a bit of the loss.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for --bits; read when CUDA starts
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gemma4_compat  # noqa: F401  (before the others)
from benchmarks import common
from benchmarks.common import Data
from benchmarks.decoding import models
from benchmarks.experts import models as experts_models
from benchmarks.small_card import device
from benchmarks.small_card.measure import planned_use
from benchmarks.training import trainers_fit

GIB = 2**30
RANK = 16
EXPERTS = "experts"


class Way(NamedTuple):
    """The switches of a step, beside the loss in chunks."""

    mlp: bool = False
    rest: bool = False
    offload: bool = False
    windows: bool = False
    products: bool = True  # with windows


WAYS = {
    "chunked": Way(),
    "mlp": Way(mlp=True),
    "pieces": Way(mlp=True, rest=True),
    "offload": Way(mlp=True, rest=True, offload=True),
    "windows": Way(mlp=True, rest=True, windows=True),
    "all": Way(mlp=True, rest=True, offload=True, windows=True),
}
#: Ways whose loss has the bits of the way before.
SAME = ("pieces", "offload", "all")


def load(shape: str, where: str, folder: Path) -> tuple[Any, Data]:
    """The base, frozen, and what it took, with what it was made of."""
    started = time.perf_counter()
    if where == EXPERTS:
        model = experts_models.placed(shape, experts_models.hosted_experts(shape), EXPERTS)
    else:
        models.build(shape, folder)
        model = models.load(where, folder)
    device.forget_peak()
    device.synchronize()
    return model.requires_grad_(False), {"load_s": time.perf_counter() - started, "loaded": device.memory()}


class Steps:
    """An adapted model, and steps of it that begin with the same adapter each time."""

    def __init__(self, base: Any, *, rank: int, tokens: int | None) -> None:
        import torch
        from peft import LoraConfig, get_peft_model

        from gemma4_compat._plan.training_step import TARGETS

        self.tokens = tokens
        self.model = get_peft_model(base, LoraConfig(r=rank, lora_alpha=rank, target_modules=TARGETS)).train()
        self.model.enable_input_require_grads()
        self.trained = {name: one for name, one in self.model.named_parameters() if one.requires_grad}
        generator = torch.Generator().manual_seed(0)
        self.initial = {
            name: torch.empty(one.shape).normal_(0.0, 0.02, generator=generator) for name, one in self.sorted()
        }
        for _, weight in self.sorted():
            weight.data = weight.data.float()

    def sorted(self) -> list[tuple[str, Any]]:
        """The weights that are trained."""
        return sorted(self.trained.items())

    @contextlib.contextmanager
    def switched(self, way: Way, **graphs: Any) -> Any:
        """Inside, these parts of `train_fast` are on, and the adapter is as in the beginning."""
        import torch

        from gemma4_compat._training import norms, per_layer, shared_states

        common.checkpointing(self.model, offload=way.offload)
        mlp = way.mlp and (self.tokens or True)
        products = way.windows and way.products
        common.parts(self.model, loss=True, mlp=mlp, windows=way.windows, products=products, **graphs)
        if not way.rest:
            for part in (norms, shared_states, per_layer):
                part.leave(self.model)
        with torch.no_grad():
            for name, weight in self.trained.items():
                weight.copy_(self.initial[name])
                weight.grad = None
        try:
            yield
        finally:
            for weight in self.trained.values():
                weight.grad = None
            device.forget_peak()

    def tokens_of(self, sequence: int, seed: int = 1) -> Any:
        """Random tokens, (1, ``sequence``), int64, on the device."""
        import torch

        vocabulary = self.model.config.get_text_config().vocab_size
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, min(250_000, vocabulary - 16), (1, sequence), generator=generator)
        return ids.to(device.main_device())

    def text(self, sequence: int) -> Data:
        """A batch of one text, of random tokens."""
        ids = self.tokens_of(sequence)
        return {"input_ids": ids, "attention_mask": ids.new_ones(ids.shape), "labels": ids}

    def loss(self, batch: Data) -> Any:
        """After a forward and a backward pass."""
        import torch

        with torch.autocast(batch["input_ids"].device.type, dtype=torch.bfloat16):
            loss = self.model(**batch, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def measured(self, way: Way, sequence: int, *, steps: int) -> Data:
        """Time and peaks of steps after a first one."""
        import torch

        with self.switched(way):
            optimizer = torch.optim.AdamW(list(self.trained.values()), lr=1e-4)
            device.forget_peak()
            seconds, losses = self.timed(optimizer, itertools.repeat(self.text(sequence), 1 + steps))
            median = statistics.median(seconds[1:])
            found = {"first_s": seconds[0], "seconds": seconds[1:], "tokens_per_second": sequence / median}
            return found | {"memory": device.memory(), "losses": losses}

    def timed(self, optimizer: Any, batches: Iterable[Data]) -> tuple[list[float], list[str]]:
        """Seconds and loss of the step of each batch."""
        seconds, losses = [], []
        for batch in batches:
            device.synchronize()
            started = time.perf_counter()
            loss = self.loss(batch)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(f"{loss.item():.9g}")
            seconds.append(time.perf_counter() - started)
        return seconds, losses

    def fits(self, way: Way, sequence: int, budget: float) -> bool:
        """Whether a step, of an optimizer with states, runs beside a ballast tensor."""
        import torch

        with device.ballast(budget):
            try:
                self.measured(way, sequence, steps=1)
            except torch.cuda.OutOfMemoryError:
                return False
            finally:
                device.forget_peak()  # before the ballast goes
        return True

    def bits(self, way: Way, sequence: int) -> tuple[Any, dict[str, Any]]:
        """Loss and gradients of a step."""
        with self.switched(way):
            loss = self.loss(self.text(sequence))
            return loss.cpu(), {name: weight.grad.cpu() for name, weight in self.sorted()}


def against(before: tuple[Any, dict[str, Any]], found: tuple[Any, dict[str, Any]]) -> Data:
    """How one step's loss and gradients compare with another's."""
    (loss, gradients), (other, others) = before, found
    total = sum(float(one.double().norm()) ** 2 for one in gradients.values())
    apart = sum(float((gradients[name].double() - others[name].double()).norm()) ** 2 for name in gradients)
    return {
        "loss": f"{other.item():.9g}",
        "loss_equal": bool(loss.equal(other)),
        "gradients_equal": sum(gradients[name].equal(others[name]) for name in gradients),
        "gradients": len(gradients),
        "apart": math.sqrt(apart / total),
    }


class Run:
    """What is left of the time, and the result so far."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.deadline = arguments, time.monotonic() + arguments.seconds
        self.result = common.header(Path(__file__), sys.modules[__name__], arguments.shape, common.shown(arguments))
        self.result |= {"where": arguments.where, "rank": arguments.rank, "machine": device.machine()}
        self.result |= {"cells": {}, "fits": {}, "bits": {}, "out": {}}

    def attempt(self, name: str, seconds: float, action: Any) -> Any:
        """What ``action`` returns; None if it would take too long, or raised, which is kept."""
        import torch

        if time.monotonic() + seconds > self.deadline:
            self.result["not_run"].append(name)
            return None
        try:
            return action()
        except torch.cuda.OutOfMemoryError as error:
            self.result["out"][name] = common.told(error, common.ROOT)
        except Exception as error:  # noqa: BLE001  (a crash is a result)
            self.result["problems"].append(f"{name}: {common.told(error, common.ROOT)}")
        finally:
            gc.collect()
            device.forget_peak()
        return None

    def keep(self, text: str) -> None:
        """Write the result so far, and say something."""
        common.write(self.result, self.arguments.out)
        print(text, flush=True)

    def all(self, folder: Path) -> None:
        """Load, compare bits, measure."""
        base, loaded = load(self.arguments.shape, self.arguments.where, folder)
        self.result |= loaded
        steps = Steps(base, rank=self.arguments.rank, tokens=self.arguments.tokens)
        self.keep(f"loaded in {loaded['load_s']:.0f} s")
        if self.arguments.bits:
            self.compare(steps, self.arguments.bits)
        for sequence in self.arguments.sequences:
            for name in self.arguments.ways:
                self.measure(steps, sequence, name)

    def compare(self, steps: Steps, sequence: int) -> None:
        """A step of each way, as deterministic as PyTorch makes it, against the way before."""
        import torch

        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        first = self.arguments.ways[0]
        begin = before = self.attempt(f"bits {first}", 0, lambda: steps.bits(WAYS[first], sequence))
        for name in [*self.arguments.ways[1:], "again"] if begin is not None else ():
            way = WAYS[first if name == "again" else name]
            found = self.attempt(f"bits {name}", 0, lambda way=way: steps.bits(way, sequence))
            if found is None:
                continue
            self.result["bits"][name] = against(begin if name == "again" else before, found)
            before = found
            if self._is_next(name) and not self.result["bits"][name]["loss_equal"]:
                self.result["problems"].append(f"{name} changes the loss")
            self.keep(f"bits of {sequence} tokens, {name}: {self.result['bits'][name]}")
        torch.use_deterministic_algorithms(False)

    def _is_next(self, name: str) -> bool:
        """Whether this way has to have the bits of the one before, and that one ran."""
        ways, all_ways = self.arguments.ways, list(WAYS)
        return name in SAME and ways[ways.index(name) - 1] == all_ways[all_ways.index(name) - 1]

    def measure(self, steps: Steps, sequence: int, name: str) -> None:
        """Time, peaks and what fits, of a way."""
        arguments, cells = self.arguments, self.result["cells"]
        way, title = WAYS[name], f"{sequence} {name}"
        expected = max(
            (
                (sum(cell["seconds"]) + cell["first_s"]) * sequence / cell["sequence"]
                for cell in cells.values()
                if cell["way"] == name
            ),
            default=0.0,
        )
        found = self.attempt(title, expected, lambda: steps.measured(way, sequence, steps=arguments.steps))
        if found is None:
            self.keep(f"{title}: {self.result['out'].get(title, 'not measured')}")
            return
        cells[title] = found | {"sequence": sequence, "way": name}
        if not all(math.isfinite(float(loss)) for loss in found["losses"]):
            self.result["problems"].append(f"{title}: a loss is not finite")
        peak, reserved = found["memory"]["peak_gib"], found["memory"]["peak_reserved_gib"]
        shown = "" if peak is None else f", {peak:.2f} GiB of tensors, {reserved:.2f} reserved"
        self.keep(f"{title}: {found['tokens_per_second']:.0f} tokens a second{shown}")
        for budget in arguments.budget if peak is not None else ():
            fits, how = reserved <= budget, "peaks"
            if peak <= budget < reserved:
                took = 2 * max(found["seconds"])
                step = functools.partial(steps.fits, way, sequence, budget)
                fits, how = self.attempt(f"{title} {budget}", took, step), "ballast"
            self.result["fits"].setdefault(title, {})[f"{budget:g}"] = {"fits": fits, "by": how}
        self.keep(f"{title}: {self.result['fits'].get(title)}")


def plan(file: Path) -> None:
    """Add the planner's peaks to a result; a way whose switches no plan has gets none."""
    from gemma4_compat._gemma4.models import build as built
    from gemma4_compat._gemma4.quantization import config
    from gemma4_compat._plan import training_step

    result = json.loads(file.read_text(encoding="utf-8"))
    if result["where"] == EXPERTS:
        raise SystemExit("no plan is made for experts that are placed by hand")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        trainers_fit.write_config(result["shape"], folder)
        for cell in result["cells"].values():
            way = WAYS[cell["way"]]
            if way.mlp != way.rest:
                continue
            model = built.on_meta(str(folder / "checkpoint"))[0]  # a step changes it
            names = config.linear_names(model, models.skipped(folder))
            step = training_step.Step(
                max_length=cell["sequence"],
                padding=False,
                r=result["rank"],
                chunked_loss=True,
                chunked_mlp=way.mlp,
                activation_offloading=way.offload,
                sliding_windows=way.windows,
            )
            use = planned_use(
                folder,
                models.device_map(result["where"], folder),
                quantization="4bit-double",
                skip=models.skipped(folder),
                adapter=False,
                quantize_offloaded=True,
                training=training_step.measure(model, names, step).peak,
            )(cell["sequence"], cell["sequence"])
            cell["planned_gib"] = use.prefill / GIB
            print(cell["sequence"], cell["way"], f"{cell['planned_gib']:.2f} GiB planned", flush=True)
    common.write(result, file)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted({*models.SHAPES, *experts_models.SHAPES}))
    parser.add_argument("--where", default="streamed", help=f"of {', '.join([*models.WHERE, EXPERTS])}")
    parser.add_argument("--sequences", default="16384,32768", help="tokens of a sequence")
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)}")
    parser.add_argument("--budget", default="6,8,12", help="GiB")
    parser.add_argument("--bits", type=int, help="compare loss and gradients of steps of so many tokens")
    parser.add_argument("--steps", type=int, default=2, help="that are timed (2)")
    parser.add_argument("--tokens", type=int, help="of a piece of the MLPs, at most")
    parser.add_argument("--rank", type=int, default=RANK)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--json", type=Path, dest="out", help="write the result here")
    parser.add_argument("--plan", type=Path, help="add the planner's peaks to this result")
    arguments = parser.parse_args(argv)
    if arguments.plan:
        plan(arguments.plan)
        return 0
    if arguments.shape is None:
        parser.error("--shape is required")
    run = Run(arguments)
    common.chosen(parser, arguments, "ways", WAYS)
    arguments.sequences = [int(number) for number in arguments.sequences.split(",") if number]
    arguments.budget = [float(number) for number in arguments.budget.split(",") if number]
    work = models.work_folder("tiny" if arguments.where == EXPERTS else arguments.shape)
    with common.temporary("long-steps-", work) as folder:
        run.all(folder)
    run.keep("done")
    return common.ended(run.result)


if __name__ == "__main__":
    sys.exit(main())
