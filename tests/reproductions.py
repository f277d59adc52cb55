"""Reproductions in forks of a process that has imported the libraries: a process for each, without its imports.

``python -m tests.reproductions FOLDER`` reads one command a line (what ``python -m gemma4_compat._repro`` takes) and
answers each with one line of JSON. Importing the libraries takes longer than most reproductions. Not where there is a
GPU: CUDA does not survive a fork.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from gemma4_compat import _doctor


class Forks:
    """The process that forks. ``disabled`` is its GEMMA4_COMPAT_DISABLE."""

    def __init__(self, folder: Path, disabled: str) -> None:
        environment = dict(os.environ, PYTHONWARNINGS="ignore", TOKENIZERS_PARALLELISM="false")
        if disabled:
            environment["GEMMA4_COMPAT_DISABLE"] = disabled
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.reproductions", str(folder)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, command: str) -> dict[str, Any]:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"the process that forks ended with {self.process.wait()}"
        result: dict[str, Any] = json.loads(answer)
        return result

    def __enter__(self) -> Forks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def serve(folder: Path) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else writes to standard output

    import accelerate  # noqa: F401
    import bitsandbytes  # noqa: F401
    from peft import PeftModel  # noqa: F401
    from transformers import Gemma4ForConditionalGeneration  # noqa: F401

    from gemma4_compat import _repro

    for line in sys.stdin:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            with os.fdopen(writer, "w") as out:
                out.write(json.dumps(_repro.run(line.strip(), folder)))
            os._exit(0)  # without what the parent would do at its end
        os.close(writer)
        with os.fdopen(reader) as found:
            text = found.read()
        _, status = os.waitpid(child, 0)
        if not text:
            text = json.dumps(_doctor._dead(f"the process ended with {os.waitstatus_to_exitcode(status)}"))
        answers.write(f"{text}\n")
        answers.flush()


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
