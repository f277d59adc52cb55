"""Runs: batches of inputs in worker processes, watched, counted, resumable."""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import platform
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import gemma4_compat
from gemma4_compat._engine import versions
from gemma4_compat._engine.io.text import runs
from tests.generated.fuzz.readers import Reader
from tests.generated.fuzz.worker import Tally, Task, main

_LOST = 120.0  # wall-clock seconds after which an input is taken for one that never comes back
#: How a worker starts.
_START = "spawn"
_LIBRARIES = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "hypothesis")


class Worker:
    """A worker process and what it is at."""

    def __init__(self) -> None:
        context: Any = multiprocessing.get_context(_START)
        self.heartbeat = context.RawArray("d", 2)
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=main, args=(theirs, self.heartbeat), daemon=True)
        self.process.start()
        theirs.close()
        self.task: Task | None = None

    def start(self, task: Task) -> None:
        self.task = task
        self.heartbeat[1] = 0.0
        self.connection.send(task)

    @property
    def lost(self) -> bool:
        """Whether its input takes too long, or the process is gone."""
        began = self.heartbeat[1]
        return not self.process.is_alive() or (began > 0 and time.monotonic() - began > _LOST)

    def end(self) -> None:
        """Let it end by itself, which removes its folder, if it waits for a task; else kill it."""
        if self.task is None and self.process.is_alive():
            self.connection.send(None)
            self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.connection.close()


class Run:
    """A run over some readers; what it found is in ``data`` and, after every batch, in ``file``."""

    def __init__(self, readers: list[Reader], inputs: int, seed: int, file: Path, corpus: Path) -> None:
        self.readers = readers
        self.inputs = inputs
        self.file = file
        self.corpus = corpus
        known = json.loads(file.read_text()) if file.is_file() else {}
        if known and known["seed"] != seed:
            raise SystemExit(f"{file} is of the seed {known['seed']}; give --seed {known['seed']} or another --out")
        self.data: dict[str, Any] = {
            "seed": seed,
            "gemma4_compat": gemma4_compat.__version__,
            "python": platform.python_version(),
            "versions": {name: version for name in _LIBRARIES if (version := versions.installed(name))},
            "readers": known.get("readers", {}),
        }
        for reader in readers:
            self.data["readers"].setdefault(reader.name, _empty(reader))

    def run(self, jobs: int, seconds: float | None) -> None:
        """Run until every reader has its inputs, or the time is over."""
        deadline = time.monotonic() + seconds if seconds else float("inf")
        tasks, workers = self._tasks(), [Worker() for _ in range(jobs)]
        try:
            for worker in workers:
                self._next(worker, tasks, deadline)
            while busy := [worker for worker in workers if worker.task]:
                ready = wait([worker.connection for worker in busy], timeout=1.0)
                for worker in busy:
                    if worker.connection in ready and (tally := _received(worker)) is not None:
                        self._add(tally)
                        self._next(worker, tasks, deadline)
                    elif worker.lost:
                        workers[workers.index(worker)] = self._replaced(worker)
        finally:
            for worker in workers:
                worker.end()

    def _tasks(self) -> Iterator[Task]:
        """Batches of the readers in turns, those left out that are done."""
        for number in itertools.count():
            left = [reader for reader in self.readers if number * reader.batch < self.inputs]
            if not left:
                return
            for reader in left:
                if not any(first <= number <= last for first, last in self.data["readers"][reader.name]["batches"]):
                    count = min(reader.batch, self.inputs - number * reader.batch)
                    yield Task(reader.name, self.data["seed"], number, count)

    def _next(self, worker: Worker, tasks: Iterator[Task], deadline: float) -> None:
        worker.task = None
        if time.monotonic() < deadline and (task := next(tasks, None)) is not None:
            known = frozenset(item["signature"] for item in self.data["readers"][task.reader]["failures"])
            worker.start(Task(task.reader, task.seed, task.batch, task.count, known=known))

    def _replaced(self, worker: Worker) -> Worker:
        """A new worker that goes on behind the input at which the old one was lost."""
        task, index = worker.task, int(worker.heartbeat[0])
        assert task is not None
        worker.end()
        other = Worker()
        other.start(Task(task.reader, task.seed, task.batch, task.count, index + 1, index, task.known))
        return other

    def _add(self, tally: Tally) -> None:
        item = self.data["readers"][tally.task.reader]
        item["tried"] += tally.tried
        item["seconds"] = round(item["seconds"] + tally.seconds, 1)
        for kind, count in tally.kinds.items():
            item[kind.replace(" ", "_")] += count
        item["handled"] = item["answer"] + item["error"]
        item["slowest"] = max(item["slowest"], list(tally.slowest))
        item["largest"] = max(item["largest"], list(tally.largest))
        done = [number for first, last in item["batches"] for number in range(first, last + 1)]
        item["batches"] = runs(sorted([*done, tally.task.batch]))
        for signature, failure in tally.failures.items():
            known = next((one for one in item["failures"] if one["signature"] == signature), None)
            if known is None:
                known = {"signature": signature, "kind": failure["kind"], "count": 0, "detail": failure["detail"]}
                known["file"] = self._save(tally.task.reader, signature, failure)
                item["failures"].append(known)
                print(f"{tally.task.reader}: {signature} ({known['file']})", flush=True)
            known["count"] += failure["count"]
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(self.data, indent=1) + "\n")

    def _save(self, reader: str, signature: str, failure: dict[str, Any]) -> str:
        self.corpus.mkdir(parents=True, exist_ok=True)
        name = f"{reader}-{hashlib.sha256(signature.encode()).hexdigest()[:8]}.json"
        (self.corpus / name).write_text(failure["case"].as_text(reader=reader, found=signature) + "\n")
        return name


def _received(worker: Worker) -> Tally | None:
    try:
        tally: Tally = worker.connection.recv()
    except (EOFError, ConnectionResetError):
        return None
    return tally


def _empty(reader: Reader) -> dict[str, Any]:
    bound = reader.bound
    return {
        "about": reader.about,
        "bound": {
            "seconds": [bound.seconds, bound.seconds_per_mib],
            "mib": [bound.mib, bound.mib_per_mib],
            "counted_mib": bound.counted >> 20,
        },
        **dict.fromkeys(
            ("tried", "handled", "answer", "error", "traceback", "over_time", "over_memory", "violation"), 0
        ),
        "seconds": 0.0,
        "slowest": [0.0, 0],
        "largest": [0.0, 0],
        "batches": [],
        "failures": [],
    }
