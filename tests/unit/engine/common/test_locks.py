"""The locks of the package: who waits for whom, the order in which they are taken, and that nobody waits forever."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import pytest

from gemma4_compat import Gemma4CompatError
from gemma4_compat._engine.runtime import locks
from tests.helpers import ROOT
from tests.unit.offload.threads import run_together


def test_one_thread_as_often_as_it_likes_and_others_in_turn() -> None:
    lock, order = locks.Lock(locks.DECODING), []
    with lock.held():
        assert lock.run(lock.holders) == {threading.get_ident()}
        others = [threading.Thread(target=lock.run, args=(order.append, number), daemon=True) for number in range(3)]
        for number, other in enumerate(others):
            other.start()
            while len(lock._queue) <= number:
                time.sleep(0.001)
        assert order == []
    for other in others:
        other.join(20)
    assert order == [0, 1, 2]
    assert not lock.holders()


def test_a_circle_of_waiting_threads_is_an_error_whatever_the_locks_are() -> None:
    """Three threads, each with a lock that the one before it wants: one gets an error, the others go on."""
    found = [locks.Lock(rank) for rank in (locks.MODEL, locks.DECODING, locks.TRAINING)]
    both = threading.Barrier(3, timeout=20)

    def work(index: int) -> Any:
        def second() -> None:
            both.wait()
            found[(index + 1) % 3].run(int)

        return lambda: found[index].run(second)

    with unwatched():
        raised = run_together([work(index) for index in range(3)], limit=20)
    (error,) = (error for error in raised if error is not None)
    assert isinstance(error, Gemma4CompatError)
    assert "wait for each other" in str(error)
    assert not any(lock.holders() for lock in found)


def test_nobody_waits_in_a_capture() -> None:
    """Whoever holds the lock may be waiting for that very capture."""
    model, capturing = locks.Lock(locks.MODEL), locks.Lock(locks.CAPTURING)
    inside, go_on = threading.Event(), threading.Event()
    other = threading.Thread(target=model.run, args=(lambda: inside.set() or go_on.wait(20),), daemon=True)
    other.start()
    assert inside.wait(20)
    with unwatched(), capturing.held(), pytest.raises(Gemma4CompatError, match="while a CUDA graph is captured"):
        model.run(int)
    assert not model._queue
    go_on.set()
    other.join(20)
    with unwatched(), capturing.held():
        assert model.run(int) == 0, "it is free"


def test_the_order_is_checked_in_every_test() -> None:
    """What the fixture of all tests looks at, shown to find what it is there for."""
    found = []
    with unwatched():
        locks.watch = lambda lock, held: found.append((held, lock.rank))
        with locks.Lock(locks.TRAINING).held(), locks.Lock(locks.MODEL).held():
            pass
    assert found == [([], locks.TRAINING), ([locks.TRAINING], locks.MODEL)]


def test_every_other_lock_of_the_package_guards_a_few_lines() -> None:
    """Those that Python has are listed here with what they guard, so that a new one is thought about."""
    guards = {
        "_engine/runtime/in_place.py": "what is put in the place of a method",
        "_engine/runtime/locks.py": "the attributes of locks",
        "_kernels/compiling.py": "loading a kernel",
        "_engine/runtime/selftest.py": "trying something once on a device",
        "_engine/io/terminal.py": "the last line of a terminal",
        "_kernels/kernels.py": "the kernels of devices",
        "_kernels/launching.py": "a kernel's memory",
        "_kernels/match/custom.py": "defining operations once",
        "_doctor/reproductions/children.py": "a child process",
        "_engine/changes.py": "replacing a function",
        "_engine/engine.py": "applying patches",
        "_training/captured/graphs.py": "launching a graph whose memory others share",
        "_offload/transfer/idle_hooks.py": "putting hooks aside",
        "_lab/stand_ins/tape.py": "a stand-in for a capture",
        "_generation/prefix_cache/session.py": "one attribute",
        "patches/generation/transformers_early_exit.py": "which threads see fewer layers",
        "cli/serving/answers.py": "a processor, and the places in a queue",
    }
    made = re.compile(r"threading\.(R?Lock|Condition|Semaphore|Event|Barrier)\(")
    package = ROOT / "gemma4_compat"
    files = [path for path in package.rglob("*.py") if made.search(path.read_text(encoding="utf-8"))]
    assert {path.relative_to(package).as_posix() for path in files} == guards.keys()


def test_no_code_walks_the_stack_of_another_thread() -> None:
    """A frame's callers are read while that thread runs: a generator that yields meanwhile has none."""
    package = ROOT / "gemma4_compat"
    lines: set[str] = {
        f"{path.relative_to(package).as_posix()}: {line.strip()}"
        for path in package.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if "_current_frames" in line
    }
    assert lines == {"_offload/model_lock.py: frame = sys._current_frames().get(thread)"}
    assert "f_back" not in (package / "_offload" / "model_lock.py").read_text(encoding="utf-8")


class unwatched:  # noqa: N801  (used as a function)
    """Inside, the fixture of all tests does not look."""

    def __enter__(self) -> None:
        self._before, locks.watch = locks.watch, None

    def __exit__(self, *_: Any) -> None:
        locks.watch = self._before
