"""Run reproductions in child processes: a process each, or forks of one that has imported the libraries.

Importing the libraries takes longer than most reproductions, so :class:`Forks` imports them once. Separate processes
are needed where a fork is not safe: with a GPU (CUDA does not survive a fork) and on systems other than Linux.
Nothing upstream is imported except in the process that forks (``python -m gemma4_compat._doctor.children FOLDER``).
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from types import TracebackType
from typing import IO, Any

#: Seconds one child may take. A child takes seconds; importing everything from a cold network disk can take minutes.
TIMEOUT = 600


def alone(command: str, folder: Path, *, disabled: str = "") -> dict[str, Any]:
    """The result of ``python -m gemma4_compat._doctor.child`` for ``command``, in a new process.

    A crash counts as a defect, with the last line of its output. ``disabled`` is the child's GEMMA4_COMPAT_DISABLE.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", "gemma4_compat._doctor.child", command, str(folder)],
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
        return crashed(_ended(done.returncode, done.stderr or done.stdout))
    result: dict[str, Any] = json.loads(last)
    return result


def crashed(detail: str) -> dict[str, Any]:
    """The result of a reproduction whose process crashed or timed out."""
    result = {"defect": True, "detail": detail, "parity": None, "applicable": True, "seconds": None}
    return result | {"state": "unknown", "reason": detail, "detection": None}


class Forks:
    """A process that has imported the libraries and forks for each command; faster than :func:`alone`.

    Args:
        folder: of the :class:`~gemma4_compat._reproduction.workspace.Workspace`.
        disabled: its GEMMA4_COMPAT_DISABLE.
    """

    def __init__(self, folder: Path, disabled: str = "") -> None:
        self._output = _file()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gemma4_compat._doctor.children", str(folder)],
            env=_environment(disabled),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            text=True,
        )

    def __call__(self, command: str) -> dict[str, Any]:
        """Run one command and wait for its result; not thread-safe."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the process that forks has no pipes")
        try:
            self._process.stdin.write(f"{command}\n")
            self._process.stdin.flush()
            reply = self._process.stdout.readline()
        except BrokenPipeError:
            reply = ""
        if not reply:
            status = self._process.wait()
            self._output.seek(0)
            return crashed(_ended(status, self._output.read()))
        result: dict[str, Any] = json.loads(reply)
        return result

    def __enter__(self) -> Forks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()
        self._output.close()


def _environment(disabled: str) -> dict[str, str]:
    environment = dict(os.environ, PYTHONWARNINGS=os.environ.get("PYTHONWARNINGS", "ignore"), HF_HUB_OFFLINE="1")
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    environment.setdefault("OMP_NUM_THREADS", "1")  # a tiny model computes faster in one thread
    if disabled:
        environment["GEMMA4_COMPAT_DISABLE"] = disabled
    return environment


def _ended(status: int, output: str) -> str:
    lines = output.strip().splitlines()
    return f"the process ended with {status}: {lines[-1] if lines else 'no output'}"


def _file() -> IO[str]:
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")


def _serve(folder: Path) -> None:
    """Run each line of standard input as a command and print its result as a line of JSON."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output goes to standard error

    import accelerate  # noqa: F401
    import bitsandbytes  # noqa: F401
    from peft import PeftModel  # noqa: F401
    from transformers import Gemma4ForConditionalGeneration  # noqa: F401

    from gemma4_compat._doctor.child import run

    for line in sys.stdin:
        with _file() as output:
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(reader)
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                status = 1
                try:
                    with os.fdopen(writer, "w") as out:
                        out.write(json.dumps(run(line.strip(), folder)))
                    status = 0
                finally:
                    if status:
                        traceback.print_exc()
                    sys.stderr.flush()
                    os._exit(status)  # skip the parent's exit handlers
            os.close(writer)
            text = _read(reader, child)
            _, ended = os.waitpid(child, 0)
            if text is None:
                text = json.dumps(crashed(f"no result after {TIMEOUT} s"))
            elif not text:
                output.seek(0)
                text = json.dumps(crashed(_ended(os.waitstatus_to_exitcode(ended), output.read())))
        results.write(f"{text}\n")
        results.flush()


def _read(reader: int, child: int) -> str | None:
    """Everything ``child`` sends; None if it timed out and was killed."""
    with os.fdopen(reader) as found:
        if not select.select([found], [], [], TIMEOUT)[0]:
            os.kill(child, signal.SIGKILL)
            return None
        return found.read()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
