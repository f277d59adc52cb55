"""How long are the rollout and the training step of GRPO, upstream and replayed, and what do they take of a card?

python benchmarks/training/grpo_steps.py --shape E2B --json FILE.json
    [--where host] [--adapter bfloat16] [--exact] [--tokens 256] [--rounds 3] [--budget 8,12] [--seconds 480]

A 4-bit model with random weights and a LoRA adapter in training mode. A whole step draws eight completions of so many
tokens after a prompt of 64, at temperature 1 from all words, and trains on them: log-probabilities under bf16
autocast, with checkpointing, the head in pieces; made-up advantages; AdamW. There is no reward. Two ways take turns:

upstream    no patch of this package is applied, and the cache is dynamic; with another `--where` than "gpu" all
            patches are, since upstream fails or copies tables for each token, and only `decode_fast` is off
replayed    after `decode_fast`, once its graphs are captured (`warming` has the seconds of the rollouts until then);
            `--exact` for PyTorch's arithmetic

For each way and round: seconds and PyTorch's peaks of rollout and training step; nothing is emptied between them. A
budget fits where the peak of reserved memory does, and does not where that of tensors does not. Between the two a
ballast tensor leaves so much (GiB) to this process's tensors, and a whole step decides. "log_probabilities": how far
those of a rollout, which reads a token at a time, are from those of the training step's forward.

What would not end within `--seconds` is left out; the file is written after every measurement. Without a GPU nothing
is replayed. Exit code 1: something raised, a number is not finite, or nothing was replayed on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gemma4_compat
from benchmarks import common
from benchmarks.common import Data
from benchmarks.decoding import models
from benchmarks.small_card import device
from benchmarks.training import rollouts

WAYS = ("upstream", "replayed")
PARTS = ("rollout", "training")
COUNTS = ("replayed", "captured", "fused", "prompts_replayed")
#: Rollouts after which a graph should be neither captured nor fused any more, at most.
SETTLED = 4


class Run:
    """The model, what is left of the time, and the result so far."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.deadline = arguments, time.monotonic() + arguments.seconds
        self.result = common.header(Path(__file__), sys.modules[__name__], arguments.shape, common.shown(arguments))
        self.result |= {"where": arguments.where, "adapter": arguments.adapter, "exact": arguments.exact}
        self.result |= {"rows": rollouts.ROWS, "prompt": rollouts.PROMPT, "tokens": arguments.tokens}
        self.result |= {"machine": device.machine(), "whole_shim_off": arguments.where == "gpu"}
        self.result |= {"rounds": [], "summary": {}, "log_probabilities": {}, "fits": {}}

    def load(self, folder: Path) -> None:
        """The model; an optimizer that has states; an adapter that changes something."""
        import torch

        started = time.perf_counter()
        self.model = rollouts.adapted(self.arguments.shape, self.arguments.where, folder)
        trained = [one for one in self.model.parameters() if one.requires_grad]
        for one in trained:
            one.data = one.data.to(getattr(torch, self.arguments.adapter))
        self.optimizer = torch.optim.AdamW(trained, lr=1e-3)
        self.ids = models.text_prompt(self.model, rollouts.PROMPT)["input_ids"].repeat(rollouts.ROWS, 1)
        rollouts.step(self.model, self.draw(new=2).sequences, self.optimizer)
        device.forget_peak()
        self.result["loaded"] = device.memory()
        self.keep(f"loaded in {time.perf_counter() - started:.0f} s")

    def draw(self, *, new: int | None = None, logits: bool = False) -> Any:
        """A rollout."""
        sampled = {"do_sample": True, "temperature": 1.0, "top_k": 0, "output_logits": logits}
        return rollouts.generate(self.model, self.ids, new=new or self.arguments.tokens, **sampled)

    @contextlib.contextmanager
    def way(self, name: str) -> Iterator[list[float]]:
        """Inside, the model decodes in this way. Gives the seconds of the rollouts that captured."""
        if name == "upstream":
            with without_shim() if self.result["whole_shim_off"] else contextlib.nullcontext():
                yield []
            return
        gemma4_compat.decode_fast(self.model, exact=self.arguments.exact)
        try:
            yield self._warmed()
        finally:
            gemma4_compat.decode_fast(self.model, enabled=False)

    def _warmed(self) -> list[float]:
        """The seconds of rollouts until one captures and fuses nothing."""
        seconds: list[float] = []
        while len(seconds) < SETTLED:
            before = self._counted()
            seconds.append(timed(self.draw)[1]["seconds"])
            after = self._counted()
            if all(after[name] == before[name] for name in COUNTS[1:3]):
                break
        return seconds

    def _counted(self) -> dict[str, int]:
        counted = gemma4_compat.statistics(self.model).decoding
        return {name: getattr(counted, name) for name in COUNTS}

    def whole(self, way: str) -> Data:
        """A rollout and the training step that follows, in this way."""
        with self.way(way) as warming:
            device.forget_peak()
            before = self._counted()
            texts, rollout = timed(lambda: self.draw().sequences)  # TRL keeps no cache either
            steps = {name: count - before[name] for name, count in self._counted().items()}
            trained, training = timed(lambda: rollouts.step(self.model, texts, self.optimizer))
        return {"rollout": rollout, "training": training, "steps": steps, "warming": warming, **trained}

    def apart(self, way: str) -> Data:
        """How far log-probabilities of a rollout are from those of the training step's forward."""
        import torch

        with self.way(way):
            drawn = self.draw(logits=True)
            tokens = drawn.sequences[:, rollouts.PROMPT :, None].unbind(1)
            found = [
                torch.log_softmax(logits.float(), -1).gather(-1, token)
                for logits, token in zip(drawn.logits, tokens, strict=True)
            ]
            del drawn.logits
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            with torch.no_grad():
                expected = rollouts.log_probabilities(self.model, drawn.sequences)
        difference = (torch.cat(found, 1) - expected).abs()
        values = {"mean": difference.mean(), "largest": difference.max(), "training_mean": expected.mean()}
        return {name: value.item() for name, value in values.items()} | {"tokens": difference.numel()}

    def fits(self, way: str, budget: float) -> bool:
        """Whether a whole step runs beside a ballast tensor, and is replayed if it should be."""
        import torch

        with device.ballast(budget):
            try:
                return self.whole(way)["steps"]["replayed"] > 0 or way == "upstream"
            except torch.cuda.OutOfMemoryError:
                return False
            finally:
                self.optimizer.zero_grad()
                device.forget_peak()  # before the ballast goes

    def attempt(self, name: str, seconds: float, action: Callable[[], Any]) -> Any:
        """What ``action`` returns; None if it would take too long, or raised, which is kept."""
        if time.monotonic() + seconds > self.deadline:
            self.result["not_run"].append(name)
            return None
        try:
            return action()
        except Exception as error:  # noqa: BLE001  (a crash is a result)
            self.result["problems"].append(f"{name}: {common.told(error, common.ROOT)}")
        finally:
            device.forget_peak()
        return None

    def keep(self, text: str) -> None:
        """Write the result so far, and say something."""
        common.write(self.result, self.arguments.out)
        print(text, flush=True)

    def all(self) -> None:
        """A round; log-probabilities; the other rounds; budgets that the peaks leave open."""
        took = self.round(0, 0.0)
        for way in WAYS:
            found = self.attempt(f"log-probabilities, {way}", took, lambda way=way: self.apart(way))
            if found is not None:
                self.result["log_probabilities"][way] = found
                self.keep(f"log-probabilities, {way}: {common.rounded(found)}")
        for number in range(1, self.arguments.rounds):
            self.round(number, took)
        for way in self.result["summary"].get("ways", {}):
            for budget in self.arguments.budget:
                self.decide(way, budget, took)

    def round(self, number: int, expected: float) -> float:
        """A whole step in each way; how many seconds that took."""
        started, found = time.monotonic(), {}
        for way in WAYS if number % 2 == 0 else reversed(WAYS):
            one = self.attempt(f"round {number}, {way}", expected / len(WAYS), lambda way=way: self.whole(way))
            if one is not None:
                found[way] = one
                self.result["problems"] += wrong(way, one)
                parts = ", ".join(f"{part} {one[part]['seconds']:.2f} s" for part in PARTS)
                self.keep(f"round {number}, {way}: {parts}, {one['steps']}")
        if len(found) == len(WAYS):
            self.result["rounds"].append(found)
            self.result["summary"] = summed(self.result["rounds"])
            self.keep(f"round {number}: {common.rounded(self.result['summary'])}")
        return time.monotonic() - started

    def decide(self, way: str, budget: float, expected: float) -> None:
        """Whether a budget fits, and how that is known."""
        summary = self.result["summary"]["ways"][way]
        peak, reserved = summary["peak_gib"], summary["peak_reserved_gib"]
        if peak is None:
            return
        fits, how = reserved <= budget, "peaks"
        if peak <= budget < reserved:
            fits, how = self.attempt(f"{way} in {budget:g} GiB", expected, lambda: self.fits(way, budget)), "ballast"
        self.result["fits"].setdefault(way, {})[f"{budget:g}"] = {"fits": fits, "by": how}
        self.keep(f"{way} in {budget:g} GiB: {fits}, by {how}")


def wrong(way: str, one: Data) -> list[str]:
    """What a whole step must not be."""
    idle = way == "replayed" and not one["steps"]["replayed"] and device.main_device() != "cpu"
    found = {"nothing was replayed": idle, "a number is not finite": not one["finite"]}
    return [f"{way}: {text}" for text, holds in found.items() if holds]


@contextlib.contextmanager
def without_shim() -> Iterator[None]:
    """Inside, no patch is applied."""
    gemma4_compat.revert()
    try:
        yield
    finally:
        gemma4_compat.install()


def timed(action: Callable[[], Any]) -> tuple[Any, Data]:
    """What it returns; its seconds and peaks. What the caching allocator has stays there."""
    import torch

    device.synchronize()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    returned = action()
    device.synchronize()
    return returned, {"seconds": time.perf_counter() - started, **device.memory()}


def summed(rounds: list[Data]) -> Data:
    """Medians and largest peaks of each way; how many times as long upstream takes, round by round."""
    ways = {}
    for way in WAYS:
        found = [one[way] for one in rounds]
        seconds = {part: statistics.median(one[part]["seconds"] for one in found) for part in PARTS}
        shares = [one["rollout"]["seconds"] / whole_seconds(one) for one in found]
        ways[way] = {f"{part}_s": value for part, value in seconds.items()} | {
            "whole_s": statistics.median(map(whole_seconds, found)),
            "rollout_share": statistics.median(shares),
            **{f"{part}_peak_gib": highest(found, (part,), "peak_gib") for part in PARTS},
            **{name: highest(found, PARTS, name) for name in ("peak_gib", "peak_reserved_gib")},
        }
    upstream, replayed = WAYS
    times = {
        "rollout": [one[upstream]["rollout"]["seconds"] / one[replayed]["rollout"]["seconds"] for one in rounds],
        "whole": [whole_seconds(one[upstream]) / whole_seconds(one[replayed]) for one in rounds],
    }
    return {"ways": ways, "times_as_fast": {name: common.spread(values) for name, values in times.items()}}


def whole_seconds(one: Data) -> float:
    return math.fsum(one[part]["seconds"] for part in PARTS)


def highest(found: list[Data], parts: tuple[str, ...], name: str) -> float | None:
    """The largest peak of these parts; None without a GPU."""
    values = [one[part][name] for one in found for part in parts]
    return None if None in values else max(values)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True, choices=sorted(models.SHAPES))
    parser.add_argument("--where", default="gpu", choices=[name for name in models.WHERE if name != "bf16"])
    parser.add_argument("--adapter", default="float32", choices=("float32", "bfloat16"), help="TRL's is bfloat16")
    parser.add_argument("--exact", action="store_true", help="replay in PyTorch's arithmetic")
    parser.add_argument("--tokens", type=int, default=256, help="of a completion (256)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", default="8,12", help="GiB")
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--json", type=Path, dest="out", help="write the result here")
    arguments = parser.parse_args(argv)
    run = Run(arguments)
    arguments.budget = [float(number) for number in arguments.budget.split(",") if number]
    with common.temporary("grpo-steps-", models.work_folder(arguments.shape)) as folder:
        run.load(folder)
        run.all()
    run.keep("done")
    return common.ended(run.result)


if __name__ == "__main__":
    sys.exit(main())
