"""Child processes: a Python that says events as lines of JSON, and how it ended if it says no more.

Nothing waits without a limit, and no child outlives the ``with`` statement of its :class:`Process`.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from typing import IO, Any

#: Seconds that a child may take to end once it is told to, and once it says no more.
_PATIENCE, _ENDING = 5, 60


class Process:
    """A running child.

    Args:
        arguments: of the Python.
        environment: its variables (:func:`environment`).
        hear: called in a thread with each event, then with None; default: :meth:`event` returns them.

    Attributes:
        late: whether it was ended because :meth:`event` waited in vain.
    """

    def __init__(
        self, *arguments: str, environment: dict[str, str], hear: Callable[[dict[str, Any] | None], None] | None = None
    ) -> None:
        self.late = False
        self._output = text_file()
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, args=[hear or self._events.put], daemon=True)
        self._reader.start()

    def _read(self, hear: Callable[[dict[str, Any] | None], None]) -> None:
        for line in self._process.stdout or ():
            try:
                hear(json.loads(line))
            except ValueError:  # cut short: it was killed while it wrote
                break
        hear(None)

    def tell(self, text: str, *, last: bool = False) -> None:
        """Write to its standard input, and with ``last`` close it."""
        stream = self._process.stdin
        assert stream is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; `ended` says how
            if text:
                stream.write(text)
                stream.flush()
        with contextlib.suppress(BrokenPipeError):
            if last:
                stream.close()

    def event(self, seconds: float) -> dict[str, Any] | None:
        """The next; None if it says no more. If it says nothing for so many seconds, it is ended."""
        try:
            return self._events.get(timeout=max(seconds, 0))
        except queue.Empty:
            self.late = self._process.poll() is None
            self.kill()
            return None

    def kill(self) -> None:
        """End it now."""
        self._process.kill()
        self._process.wait()

    def ended(self) -> tuple[int, str]:
        """Its exit status, and what it wrote to standard error; it is ended if it does not end."""
        self._wait(_ENDING)
        self._output.seek(0)
        return self._process.returncode, self._output.read()

    def _wait(self, seconds: float) -> None:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.tell("", last=True)
        self._wait(0 if kind else _PATIENCE)  # with an error, this process was interrupted
        self._reader.join(_PATIENCE)
        if self._process.stdout is not None and not self._reader.is_alive():
            self._process.stdout.close()
        self._output.close()


def environment(changes: Mapping[str, str], *, threads: bool = False) -> dict[str, str]:
    """Variables for a child, with ``changes``. A tiny model computes faster in one thread, a larger one in many."""
    defaults = {"PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"}
    defaults |= {} if threads else {"OMP_NUM_THREADS": "1"}
    return {**defaults, **os.environ, "HF_HUB_OFFLINE": "1", **changes}


def events() -> Callable[[dict[str, Any]], None]:
    """In a child: the function that says an event. What else it prints goes to standard error from now on."""
    said = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(event: dict[str, Any]) -> None:
        said.write(json.dumps(event) + "\n")
        said.flush()

    return say


def how(status: int, output: str) -> str:
    """How a process ended without a result, and the last line that it wrote."""
    lines = output.strip().splitlines()
    return f"the process ended with {status}: {lines[-1] if lines else 'no output'}"


def text_file() -> IO[str]:
    """A file for the output of a process, deleted when it is closed."""
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
