"""Threads that do different things to one model or two, for as long as you like: ``python -m
tests.unit.offload.threads_soak --minutes 60 --out FILE.json``.

Each round draws how many threads there are (2, 4 or 10), how often Python switches between them (1 us or 5 ms), and
whether they share one model or two: split (every layer streamed, towers and embeddings on the host), whole, and split
with a second one beside it. Each thread draws forwards, ``generate`` (its steps are replayed, by a stand-in for CUDA
graphs), gradients, and training of a model of its own with ``train_fast``. Each answer must be that of one thread, bit
by bit, and every thread must end: exit status 0. A round that hangs ends the process, with the stacks of all threads.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import collections
import contextlib
import faulthandler
import itertools
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.unit.offload import threads

THREADS, INTERVALS = (2, 4, 10), (1e-6, 5e-3)
LIMIT = 600  # seconds for a round
CALLS = 3  # of each thread in a round
#: What the threads share: ``calls.Models`` places, with or without an adapter.
SHARED = (
    (("streamed", "language"),),
    (("device", "language"),),
    (("streamed", None), ("streamed", "language")),
    (("streamed", "language"), ("device", None)),
)


class Places:
    """The models, and what each does in one thread."""

    def __init__(self, workspace: Any) -> None:
        from tests.unit.generation import calls

        self._models = calls.Models(workspace)
        self._expected: dict[Any, Any] = {}

    def works(self, shared: tuple[tuple[str, str | None], ...]) -> list[tuple[str, Callable[[], None]]]:
        """What a thread may do to these models, by name: raises AssertionError where an answer is another one."""
        found = []
        for (where, adapter), (name, work) in itertools.product(
            shared, (("forward", forward), ("generate", generate), ("gradients", gradients))
        ):
            if name != "gradients" or adapter:
                model = self._models("4bit-double" if where == "streamed" else None, adapter, where)
                found += [(f"{name} {where}", self._same((where, adapter, name), lambda w=work, m=model: w(m)))]
        return found

    def _same(self, key: Any, work: Callable[[], list[Any]]) -> Callable[[], None]:
        import torch

        expected = self._expected.setdefault(key, None) or work()
        self._expected[key] = expected

        def checked() -> None:
            found = work()
            assert len(found) == len(expected)
            assert all(map(torch.equal, found, expected)), f"other bits: {key}"

        return checked

    def training(self, workspace: Any) -> Callable[[], None]:
        """Steps of a model of its own, replayed."""
        import gemma4_compat

        model = threads.adapted(workspace, workspace.load(None), "language").train()
        trainable(model)
        gemma4_compat.train_fast(model)
        return self._same("training", lambda: gradients(model))


def trainable(model: Any) -> list[Any]:
    found = [weight for name, weight in model.named_parameters() if "lora_" in name]
    for weight in found:
        weight.requires_grad_(True)
    return found


def ids(model: Any, length: int = 6) -> Any:
    import torch

    return torch.arange(5, 5 + length)[None].to(model.device)


def forward(model: Any) -> list[Any]:
    import torch

    with torch.no_grad():
        return [model(input_ids=ids(model)).logits]


def generate(model: Any) -> list[Any]:
    """With a cache of its own: before transformers 5.15 the one that ``generate`` makes is the model's."""
    from tests.unit.generation import calls

    cache = calls.static_cache(model, 32)
    made = model.generate(
        input_ids=ids(model), max_new_tokens=5, min_new_tokens=5, do_sample=False, past_key_values=cache
    )
    return [made]


def gradients(model: Any) -> list[Any]:
    import torch

    given, weights = ids(model), trainable(model)
    loss = model(input_ids=given, labels=given, use_cache=False).loss
    return [loss.detach(), *torch.autograd.grad(loss, weights)]


def round_of(seed: int, places: Places, training: Callable[[], None]) -> tuple[str, collections.Counter[str]]:
    """One round: its description, and how often each kind of work was done.

    Raises:
        AssertionError: an answer has other bits, or something was raised.
        TimeoutError: a thread has not ended.
    """
    chance = random.Random(seed)
    count, interval, shared = chance.choice(THREADS), chance.choice(INTERVALS), chance.choice(SHARED)
    beside = chance.random() < 0.5
    done: collections.Counter[str] = collections.Counter()
    choices = places.works(shared)

    def thread(index: int) -> Callable[[], None]:
        chosen = [chance.choice(choices) for _ in range(CALLS)]
        if beside and index == 0:
            chosen = [("training beside", training)] * CALLS

        def work() -> None:
            sys.setswitchinterval(interval)
            for name, call in chosen:
                call()
                done[name] += 1

        return work

    works = [thread(index) for index in range(count)]
    description = f"{count} threads, {interval:g} s, {' and '.join(where for where, _ in shared)}"
    raised = [error for error in threads.run_together(works, limit=LIMIT) if error is not None]
    if raised:
        raise AssertionError(f"{description}: {raised[0]!r}") from raised[0]
    return description, done


def soak(minutes: float, rounds: int | None = None) -> dict[str, Any]:
    """Rounds until the time is over, or as many as asked for."""
    import gemma4_compat  # noqa: F401  (armed before the libraries)
    from gemma4_compat._engine.runtime import locks
    from gemma4_compat._graphs import recording
    from gemma4_compat._lab.stand_ins.tape import standing_in
    from gemma4_compat._lab.workspace import Workspace
    from tests.generated.search import run

    works: collections.Counter[str] = collections.Counter()
    kinds: collections.Counter[str] = collections.Counter()
    with run.quiet(), tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        workspace = Workspace.build(Path(folder))
        threads.adapted(workspace, workspace.load(None), "language")  # imports what does not know the stand-in
        stack.enter_context(standing_in(recording.RECORDERS))
        places = Places(workspace)
        training = places.training(workspace)
        until = time.monotonic() + 60 * minutes
        for seed in itertools.count() if rounds is None else range(rounds):
            if time.monotonic() > until:
                break
            faulthandler.dump_traceback_later(LIMIT + 60, exit=True)
            description, done = round_of(seed, places, training)
            faulthandler.cancel_dump_traceback_later()
            works += done
            kinds[description] += 1
            assert not [lock for lock in list(locks._locks) if lock.holders() or lock._queue]
            assert threading.active_count() < 20
    return {
        "rounds": sum(kinds.values()),
        "by kind": dict(sorted(kinds.items())),
        "calls": dict(sorted(works.items())),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    found = soak(chosen.minutes)
    print(found)
    if chosen.out:
        threads.write(chosen.out, {"minutes": chosen.minutes, "load": os.getloadavg()}, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
