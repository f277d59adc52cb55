"""A process that runs inputs: it may be killed at any of them, and the next one goes on behind it."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import strategies as st

from tests.generated.fuzz import guard, minimal
from tests.generated.fuzz.case import Case
from tests.generated.fuzz.guard import Guard, Outcome
from tests.generated.fuzz.readers import READERS, Reader, find

#: Address space beyond what a worker has when it starts; who needs more gets a MemoryError.
_SPACE = 2 << 30
_KILLED = "killed: it did not come back"


@dataclass(frozen=True)
class Task:
    """Inputs ``skip`` to ``count`` of a batch of a reader; ``lost`` is one of them that killed a worker before."""

    reader: str
    seed: int
    batch: int
    count: int
    skip: int = 0
    lost: int = -1
    known: frozenset[str] = frozenset()


@dataclass
class Tally:
    """What came of a task."""

    task: Task
    tried: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    slowest: tuple[float, int] = (0.0, 0)
    largest: tuple[float, int] = (0.0, 0)
    seconds: float = 0.0
    failures: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, case: Case, outcome: Outcome) -> None:
        self.tried += 1
        self.kinds[outcome.kind] += 1
        self.slowest = max(self.slowest, (round(outcome.seconds, 3), case.nbytes))
        self.largest = max(self.largest, (round(outcome.mib, 1), case.nbytes))
        self.seconds += outcome.seconds
        if outcome.good:
            return
        failure = self.failures.setdefault(outcome.signature, {"count": 0, "case": case, **asdict(outcome)})
        failure["count"] += 1
        if case.nbytes < failure["case"].nbytes:
            failure["case"] = case


def examples(strategy: st.SearchStrategy[Case], seed: int, count: int, visit: Callable[[Case], None]) -> None:
    """Call ``visit`` with ``count`` inputs that ``seed`` decides, or with fewer where there are not as many."""
    hypothesis.seed(seed)(hypothesis_test(strategy, visit, count))()


def hypothesis_test(strategy: st.SearchStrategy[Case], visit: Callable[[Case], None], count: int = 100) -> Any:
    """``visit`` as a test of hypothesis."""

    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(strategy)
    def run(case: Case) -> None:
        visit(case)

    return run


@contextlib.contextmanager
def place() -> Iterator[Guard]:
    """A guard in a folder of its own, in memory where there is such a file system, which is the current one."""
    memory = Path("/dev/shm")
    former = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=memory if memory.is_dir() else None) as folder:
        (Path(folder) / "cwd").mkdir()
        os.chdir(Path(folder) / "cwd")
        try:
            yield Guard(Path(folder))
        finally:
            os.chdir(former)


@contextlib.contextmanager
def little_space() -> Iterator[None]:
    """Inside, this process may take :data:`_SPACE` more of address space than it has."""
    former = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (guard.status("VmSize:") * 1024 + _SPACE, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, former)


def run_case(where: Guard, reader: Reader, case: Case) -> Outcome:
    """The outcome of one input."""
    case.write(where.inputs)
    shutil.rmtree(where.out, ignore_errors=True)
    where.out.mkdir()
    return where.run(lambda: reader.call(case, where.inputs, where.out), case.nbytes, reader.bound)


def run_task(where: Guard, task: Task, heartbeat: Any) -> Tally:
    """Run a batch; ``heartbeat`` holds the number of the input and when it began."""
    reader, tally, index = find(task.reader), Tally(task), -1

    def visit(case: Case) -> None:
        nonlocal index
        index += 1
        if index == task.lost:
            tally.add(case, Outcome("over time", _KILLED, "", 0.0, 0.0))
        if index < task.skip:
            return
        heartbeat[0], heartbeat[1] = index, time.monotonic()
        tally.add(case, run_case(where, reader, case))

    examples(reader.cases, hash_of(task), task.count, visit)
    for signature, failure in tally.failures.items():
        if signature not in task.known and failure["kind"] not in ("over time", "over memory"):
            failure["case"] = minimal.minimal(
                failure["case"],
                lambda case, signature=signature: run_case(where, reader, case).signature == signature,
                beat=lambda: heartbeat.__setitem__(1, time.monotonic()),
            )
    heartbeat[1] = 0.0
    return tally


def hash_of(task: Task) -> int:
    """A seed of its own for each batch of each reader."""
    return random.Random(f"{task.reader} {task.seed} {task.batch}").getrandbits(32)


def main(connection: Any, heartbeat: Any) -> None:
    """Run the tasks that come through ``connection`` until there are no more."""
    os.environ.update({"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "131072"})
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 - what libraries say of each input
    sys.stdout = sys.stderr
    with place() as where:
        while (task := connection.recv()) is not None:
            if find(task.reader).upstream:
                warm()
            with little_space():
                connection.send(run_task(where, task, heartbeat))
            gc.collect()


@functools.cache
def warm() -> None:
    """Import the libraries, and what they import late, which no input pays for."""
    import torch

    torch.set_num_threads(1)
    importlib.import_module("peft")
    with place() as where:
        for reader in READERS:
            if reader.upstream:
                examples(reader.cases, 0, 1, lambda case, reader=reader: _forget(run_case(where, reader, case)))


def _forget(_outcome: Outcome) -> None:
    """The first input of each reader is tried again, and counted then."""
