"""Run reproductions in child processes: a process each, or forks of one that has imported the libraries.

Importing the libraries takes longer than most reproductions, so :class:`Forks` imports them once. It also loads once
the tiny models that most reproductions begin with; each fork has its own copies. Where a fork is not safe, each
reproduction has its own process: with a GPU (CUDA does not survive a fork) and on systems other than Linux. Nothing
upstream is imported except in the process that forks (:mod:`gemma4_compat._doctor.reproductions.server`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import IO, Any

#: Seconds one child may take. A child takes seconds; importing everything from a cold network disk can take minutes.
TIMEOUT = 600


def alone(command: str, folder: Path, *, disabled: str = "") -> dict[str, Any]:
    """The result of ``python -m gemma4_compat._doctor.reproductions.child`` for ``command``, in a new process.

    A crash counts as a defect, with the last line of its output. ``disabled`` is the child's GEMMA4_COMPAT_DISABLE.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", "gemma4_compat._doctor.reproductions.child", command, str(folder)],
            env=_environment(disabled),
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return crashed(f"no result after {TIMEOUT} s")
    last = done.stdout.strip().rpartition("\n")[2]
    if done.returncode != 0 or not last.startswith("{"):
        return crashed(ended(done.returncode, done.stderr or done.stdout))
    result: dict[str, Any] = json.loads(last)
    return result


def crashed(detail: str) -> dict[str, Any]:
    """The result of a reproduction whose process crashed or timed out."""
    result = {"defect": True, "detail": detail, "parity": None, "applicable": True, "seconds": None}
    return result | {"state": "unknown", "reason_code": None, "reason": detail, "detection": None}


def can_fork() -> bool:
    """Whether to try forks: on Linux, without the driver of a GPU. ``build`` says whether they are safe."""
    return sys.platform == "linux" and not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd", "/dev/accel")))


class Forks:
    """A process that has imported the libraries and forks for each command; faster than :func:`alone`.

    Args:
        folder: of the :class:`~gemma4_compat._reproduction.workspace.Workspace`.
        disabled: its GEMMA4_COMPAT_DISABLE.
    """

    def __init__(self, folder: Path, disabled: str = "") -> None:
        self._output = text_file()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gemma4_compat._doctor.reproductions.server", str(folder)],
            # Overrides the user's setting: this process computes before it forks, and OpenMP's threads do not survive.
            env=_environment(disabled) | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            text=True,
        )
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[str, Future[dict[str, Any]]] = {}
        self._ended: str | None = None
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def __call__(self, command: str) -> dict[str, Any]:
        """Run one command and wait for its result. Several threads may call this: their commands run side by side."""
        future: Future[dict[str, Any]] = Future()
        with self._lock:
            if self._ended is not None or self._process.stdin is None:
                return crashed(self._ended or "the process that forks has no pipe")
            number = str(next(self._numbers))
            self._waiting[number] = future
            # If there is no reader any more, the listener notices.
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(f"{number} {command}\n")
                self._process.stdin.flush()
        return future.result()

    def _listen(self) -> None:
        for line in self._process.stdout or ():
            reply = json.loads(line)
            with self._lock:
                future = self._waiting.pop(reply["number"])
            future.set_result(reply["result"])
        status = self._process.wait()
        self._output.seek(0)
        with self._lock:
            self._ended = ended(status, self._output.read())
            left = list(self._waiting.values())
        for future in left:
            future.set_result(crashed(self._ended))

    def __enter__(self) -> Forks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.close()  # it ends its children, then itself
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:  # perhaps it still imports the libraries, and does not read yet
            self._process.kill()
        self._listener.join()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._output.close()


def _environment(disabled: str) -> dict[str, str]:
    environment = dict(os.environ, PYTHONWARNINGS=os.environ.get("PYTHONWARNINGS", "ignore"), HF_HUB_OFFLINE="1")
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    environment.setdefault("OMP_NUM_THREADS", "1")  # a tiny model computes faster in one thread
    if disabled:
        environment["GEMMA4_COMPAT_DISABLE"] = disabled
    return environment


def ended(status: int, output: str) -> str:
    """How a process ended without a result, and the last line that it wrote."""
    lines = output.strip().splitlines()
    return f"the process ended with {status}: {lines[-1] if lines else 'no output'}"


def text_file() -> IO[str]:
    """A file for the output of a process, deleted when it is closed."""
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
