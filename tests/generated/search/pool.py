"""Work for several processes, each item with a time limit; a process that dies takes one item with it, no more.

``concurrent.futures`` gives up the whole pool when a process dies of a segmentation fault, and cannot stop one that
hangs. Both are what the search looks for.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("spawn")
#: Batches after which a process makes room for a new one: what the libraries never free does not add up.
BATCHES = 20
#: Seconds that a process has to begin, however busy the machine is, and to end by itself when its time is over.
BEGIN, GRACE = 600.0, 20.0
#: What a process says when it begins a batch.
_BEGUN = "begun"


@dataclass(frozen=True)
class Died:
    """An item that its process did not survive.

    Attributes:
        reason: ``"time limit"``, or ``"signal 11"``, or ``"exit status 3"``.
        detail: the last Python traceback, where there is one.
    """

    reason: str
    detail: str


def spread(
    function: Callable[[Any, Path], Iterator[Any]],
    batches: list[list[Any]],
    *,
    jobs: int,
    limit: float,
    start: float = 60.0,
) -> Iterator[tuple[Any, Any]]:
    """``(item, result)`` for each item of the batches, as they come; a :class:`Died` is a result, too.

    Args:
        function: of a batch and a folder to work in; yields a result for each item, in order. Importable.
        batches: what one process does in one go.
        jobs: how many processes there are.
        limit: seconds for an item.
        start: seconds more for the first item of a batch, in which a process imports libraries and makes checkpoints.
    """
    waiting = list(reversed(batches))
    with tempfile.TemporaryDirectory(prefix="gemma4-pool-", ignore_cleanup_errors=True) as folder:
        workers = [_Worker(function, Path(folder), limit, start) for _ in range(min(jobs, len(batches)))]
        try:
            while True:
                for worker in workers:
                    if not worker.batch and waiting:
                        worker.give(waiting.pop())
                busy = [worker for worker in workers if worker.batch]
                if not busy:
                    return
                wait([worker.pipe for worker in busy], timeout=1.0)
                for worker in busy:
                    yield from worker.results()
        finally:
            for worker in workers:
                worker.stop()


@dataclass
class _Worker:
    function: Callable[[Any, Path], Iterator[Any]]
    folder: Path
    limit: float
    start: float
    batch: list[Any] = field(default_factory=list)  # what is left of it
    process: Any = None
    pipe: Connection = field(init=False)
    log: Path = field(init=False)
    deadline: float = 0.0
    given: int = 0

    def give(self, batch: list[Any]) -> None:
        if self.process is None or self.given >= BATCHES:
            self._start()
        self.batch = list(batch)
        self.given += 1
        self.deadline = time.monotonic() + BEGIN
        self.pipe.send(self.batch)

    def results(self) -> Iterator[tuple[Any, Any]]:
        try:
            while self.batch and self.pipe.poll():
                result = self.pipe.recv()
                # The process watches its own time; this is for one that no longer can.
                self.deadline = time.monotonic() + self.limit + self.start + GRACE
                if result != _BEGUN:
                    yield self.batch.pop(0), result
        except (EOFError, ConnectionResetError):
            yield self._died()
        else:
            if self.batch and time.monotonic() > self.deadline:
                self.process.kill()
                yield self._died("time limit")

    def stop(self) -> None:
        if self.process is not None:
            self.pipe.close()
            self.process.terminate()
            self.process.join()

    def _died(self, reason: str | None = None) -> tuple[Any, Died]:
        self.process.join()
        text = self.log.read_text(encoding="utf-8", errors="replace")
        code = self.process.exitcode
        reason = reason or ("time limit" if "Timeout (" in text else f"signal {-code}" if code < 0 else f"exit {code}")
        self.process = None
        item, rest = self.batch[0], self.batch[1:]
        self.batch = []
        if rest:
            self.give(rest)
        return item, Died(reason, text[-4000:])

    def _start(self) -> None:
        self.stop()
        self.given = 0
        self.log = Path(tempfile.mkdtemp(prefix="worker-", dir=self.folder)) / "log"
        self.log.touch()
        self.pipe, theirs = _CONTEXT.Pipe()
        arguments = (self.function, theirs, self.log.parent, self.limit, self.start)
        self.process = _CONTEXT.Process(target=_work, args=arguments, daemon=True)
        self.process.start()
        theirs.close()


def _work(
    function: Callable[[Any, Path], Iterator[Any]], pipe: Connection, folder: Path, limit: float, start: float
) -> None:
    """What a process does: batches, until there are no more."""
    with (folder / "log").open("w", encoding="utf-8") as log:
        faulthandler.enable(log)
        while True:
            try:
                batch = pipe.recv()
            except EOFError:
                return
            pipe.send(_BEGUN)
            # The watchdog is a thread of C: it also ends a process that hangs inside a library.
            faulthandler.dump_traceback_later(limit + start, exit=True, file=log)
            for result in function(batch, folder):
                faulthandler.dump_traceback_later(limit, exit=True, file=log)
                pipe.send(result)
            faulthandler.cancel_dump_traceback_later()
