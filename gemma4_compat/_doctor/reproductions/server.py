"""A process that has imported the libraries, and forks for each reproduction.

``python -m gemma4_compat._doctor.reproductions.server FOLDER`` reads lines ``NUMBER COMMAND`` from standard input,
runs the commands of :mod:`child` side by side, and writes a line of JSON when one ends. It, and its children, end with
standard input. For Linux without a GPU: elsewhere a fork of this process is not safe.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from gemma4_compat._doctor import processes
from gemma4_compat._doctor.reproductions import children
from gemma4_compat._lab.workspace import Workspace, never_wait_for_the_disk


@dataclass
class _Child:
    """A running fork: its command, the files for its result and for its output, and its deadline."""

    number: str
    pid: int
    output: IO[str]
    deadline: float
    said: bytearray = field(default_factory=bytearray)


def serve(folder: Path) -> None:
    """Answer until standard input ends."""
    say = processes.events()

    import accelerate  # noqa: F401
    import bitsandbytes  # noqa: F401
    from peft import PeftModel  # noqa: F401
    from transformers import Gemma4ForConditionalGeneration  # noqa: F401

    from gemma4_compat import _shim
    from gemma4_compat._doctor.reproductions import child

    # Deciding about patches at an import takes as long as loading a tiny model: once here, not in each fork.
    for patch in _shim.engine.patches():
        with contextlib.suppress(Exception):  # the reproductions that need it report the error
            child.import_targets([patch])
    _share()
    never_wait_for_the_disk()
    Server(folder, say).run()


def _share() -> None:
    """Do here what the first load of a process does, so that no fork has to: a third of a reproduction's time."""
    with contextlib.suppress(ImportError):  # a thousand regular expressions, of all architectures
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("llava")
    with contextlib.suppress(ImportError):  # its bars start a thread, and a fork has only one
        import tqdm

        tqdm.tqdm.monitor_interval = 0
    gc.collect()
    gc.set_threshold(20_000, 20, 50)  # fewer collections while a tiny model is loaded and run
    gc.freeze()  # a fork's collector skips the libraries' objects, and so copies none of their pages


def _wait_for_threads() -> None:
    """Wait for the threads that a load may leave: a fork while they run would copy the locks they hold."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(10)


#: The models that forks find loaded: from which command on, how they are quantized, and how many. Quantized models
#: take a second to load, more than a few reproductions need.
PRELOADED = ((1, None, 2), (8, "4bit", 2), (8, "8bit", 2), (8, "4bit-double", 2))
#: The models whose outputs forks find, and from which command on. The first outputs of a process take longer than
#: others, so every fork that runs a model gains. Few reproductions need those with nested quantization.
PREPARED = ((2, None), (8, "4bit"), (8, "8bit"))


class Server:
    """The loop. Its only thread makes all forks."""

    def __init__(self, folder: Path, say: Callable[[dict[str, Any]], None]) -> None:
        self._folder, self._say = folder, say
        self._asked = 0  # commands but `build`
        self._running: dict[int, _Child] = {}  # by the descriptor of the pipe that a result comes through
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        waiting = b""
        self._selector.register(0, selectors.EVENT_READ)
        try:
            while True:
                for key, _ in self._selector.select(1 if self._running else None):
                    chunk = os.read(key.fd, 1 << 16)
                    if key.fd != 0:
                        self._hear(key.fd, chunk)
                    elif not chunk:
                        return
                    else:
                        *lines, waiting = (waiting + chunk).split(b"\n")
                        for line in lines:
                            self._start(line.decode())
                for descriptor in [fd for fd, child in self._running.items() if child.deadline < time.monotonic()]:
                    os.kill(self._running[descriptor].pid, signal.SIGKILL)
                    self._end(descriptor, children.crashed(f"no result after {children.TIMEOUT} s"))
        finally:
            for child in self._running.values():
                os.kill(child.pid, signal.SIGKILL)

    def _start(self, line: str) -> None:
        number, _, command = line.partition(" ")
        if command.partition(" ")[0] != "build":
            self._asked += 1
            workspace = Workspace(self._folder)
            for first, quantization, count in PRELOADED:
                if first == self._asked:  # after the collector's freeze: forks can free these models
                    workspace.preload(quantization, count)
            for first, quantization in PREPARED:
                if first == self._asked:
                    workspace.prepare(quantization)
            _wait_for_threads()
        output = processes.text_file()
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            self._work(command, writer, output)
        os.close(writer)
        self._running[reader] = _Child(number, pid, output, time.monotonic() + children.TIMEOUT)
        self._selector.register(reader, selectors.EVENT_READ)

    def _work(self, command: str, writer: int, output: IO[str]) -> None:
        """In the fork; does not return."""
        from gemma4_compat._doctor.reproductions.child import answer

        status = 1
        try:
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)  # reproductions do not read the commands
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            with os.fdopen(writer, "w") as out:
                out.write(json.dumps(answer(command, self._folder)))
            status = 0
        finally:
            if status:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)  # skip the parent's exit handlers

    def _hear(self, descriptor: int, chunk: bytes) -> None:
        child = self._running[descriptor]
        child.said += chunk
        if not chunk:
            self._end(descriptor, json.loads(child.said) if child.said else None)

    def _end(self, descriptor: int, result: dict[str, object] | None) -> None:
        """Write the result of a fork; None: it ended without a result."""
        self._selector.unregister(descriptor)
        os.close(descriptor)
        child = self._running.pop(descriptor)
        _, ended = os.waitpid(child.pid, 0)
        with child.output as output:
            if result is None:
                output.seek(0)
                result = children.crashed(processes.how(os.waitstatus_to_exitcode(ended), output.read()))
        self._say({"number": child.number, "result": result})


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
