"""Run reproductions in child processes: a process each, or forks of one that has imported the libraries.

Importing the libraries takes longer than most reproductions, so :class:`Forks` imports them once. It also loads once
the tiny models that most reproductions begin with; each fork has its own copies. Where a fork is not safe, each
reproduction has its own process: with a GPU (CUDA does not survive a fork) and on systems other than Linux. Nothing
upstream is imported except in the process that forks (:mod:`gemma4_compat._doctor.reproductions.server`).
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from concurrent import futures
from pathlib import Path
from typing import Any

from gemma4_compat._doctor import processes

#: Seconds one child may take. A child takes seconds; importing everything from a cold network disk can take minutes.
TIMEOUT = 600
_CHILD, _SERVER = (f"gemma4_compat._doctor.reproductions.{name}" for name in ("child", "server"))
#: Processes of :func:`alone`.
_running: set[processes.Process] = set()


def alone(command: str, folder: Path, *, disabled: str = "") -> dict[str, Any]:
    """The result of ``python -m gemma4_compat._doctor.reproductions.child`` for ``command``, in a new process.

    A crash counts as a defect, with the last line of its output. ``disabled`` is the child's GEMMA4_COMPAT_DISABLE.
    """
    with processes.Process("-m", _CHILD, command, str(folder), environment=_environment(disabled)) as process:
        _running.add(process)
        try:
            result = process.event(TIMEOUT)
            if process.late:
                return crashed(f"no result after {TIMEOUT} s")
            status, output = process.ended()
            return crashed(processes.how(status, output)) if result is None or status else result
        finally:
            _running.discard(process)


def end() -> None:
    """End the processes of :func:`alone`, which threads wait for."""
    for process in list(_running):
        process.kill()


def crashed(detail: str) -> dict[str, Any]:
    """The result of a reproduction whose process crashed or timed out."""
    result = {"defect": True, "detail": detail, "parity": None, "applicable": True, "seconds": None}
    return result | {"state": "unknown", "reason_code": None, "reason": detail, "detection": None}


def can_fork() -> bool:
    """Whether to try forks: on Linux, without the driver of a GPU. ``build`` says whether they are safe."""
    return sys.platform == "linux" and not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd", "/dev/accel")))


class Forks(processes.Process):
    """A process that has imported the libraries and forks for each command; faster than :func:`alone`.

    Args:
        folder: of the :class:`~gemma4_compat._lab.workspace.Workspace`.
        disabled: its GEMMA4_COMPAT_DISABLE.
    """

    def __init__(self, folder: Path, disabled: str = "") -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[str, futures.Future[dict[str, Any]]] = {}
        self._ended: str | None = None
        # Overrides the user's setting: this process computes before it forks, and OpenMP's threads do not survive.
        environment = _environment(disabled) | {"OMP_NUM_THREADS": "1"}
        super().__init__("-m", _SERVER, str(folder), environment=environment)

    def __call__(self, command: str) -> dict[str, Any]:
        """Run one command and wait for its result. Several threads may call this: their commands run side by side."""
        future: futures.Future[dict[str, Any]] = futures.Future()
        with self._lock:
            if self._ended is not None:
                return crashed(self._ended)
            number = str(next(self._numbers))
            self._waiting[number] = future
            self.tell(f"{number} {command}\n")
        try:
            return future.result(2 * TIMEOUT)  # of the process that forks: that one ends late forks
        except futures.TimeoutError:
            self.kill()
            return crashed(f"no result after {2 * TIMEOUT} s")

    def hear(self, event: dict[str, Any] | None) -> None:
        """Give a result to the thread that waits for it."""
        if event is not None:
            with self._lock:
                future = self._waiting.pop(event["number"])
            future.set_result(event["result"])
            return
        with self._lock:
            self._ended = processes.how(*self.ended())
            left = list(self._waiting.values())
        for future in left:
            future.set_result(crashed(self._ended))

    def __exit__(self, *_: object) -> None:
        super().__exit__(None)  # its input ends, so it ends its children, then itself


def _environment(disabled: str) -> dict[str, str]:
    return processes.environment({"GEMMA4_COMPAT_DISABLE": disabled} if disabled else {})
