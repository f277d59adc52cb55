"""An interpreter whose libraries are imported already, for tests that run scripts in processes of their own.

Importing torch, transformers, PEFT and bitsandbytes takes five to nine seconds of a core; a benchmark does it in each
of its processes. :func:`interpreter` writes a program that takes the arguments of ``python``. It hands them with its
environment, folder and standard streams to a process that has imported the libraries, with the shim or without, which
forks; it ends as the fork ends, and the fork ends when it is killed. In the fork ``sys.executable`` is that program,
so the children of a script are forks, too. Anything but a script (``-c``, ``-m``), and settings of the shim other
than all or nothing, are run by the real interpreter.

Run as a program this module is the process that forks: ``python -m tests.warm LISTENER PROGRAM``.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

#: The program; no library but Python's, so that it starts in hundredths of a second.
PROGRAM = """#!{python} -ISE
import array, json, os, socket, sys
real, folder = {python!r}, {folder!r}
settings = {{name: value for name, value in os.environ.items() if name.startswith("GEMMA4_COMPAT_") and value}}
name = {{"{{}}": "with", '{{"GEMMA4_COMPAT_DISABLE": "all"}}': "without"}}.get(json.dumps(settings))
if name is None or len(sys.argv) < 2 or not sys.argv[1].endswith(".py"):
    os.execv(real, [real, *sys.argv[1:]])
order = json.dumps({{"arguments": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd()}}).encode()
with socket.socket(socket.AF_UNIX) as server:
    server.connect(os.path.join(folder, name))
    streams = array.array("i", [0, 1, 2])
    server.sendmsg([len(order).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
    server.sendall(order)
    for stream in streams:
        os.close(stream)  # whoever reads hears of the fork's end
    code = server.recv(16)
code = int(code or 255)
if code < 0:
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@contextlib.contextmanager
def interpreter(folder: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """The path of such a program in ``folder``; nothing is imported before it is run.

    Args:
        folder: an empty one, of a path short enough for a socket (about 90 characters).
        environment: of the processes that import the libraries, without settings of the shim.
    """
    started = []
    for name, settings in {"with": {}, "without": {"GEMMA4_COMPAT_DISABLE": "all"}}.items():
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / name))
            listener.listen()
            command = [sys.executable, "-m", "tests.warm", str(listener.fileno()), str(folder / "python")]
            started.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env={**environment, **settings},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[listener.fileno()],
                )
            )
    program = folder / "python"
    program.write_text(PROGRAM.format(python=sys.executable, folder=str(folder)), encoding="utf-8")
    program.chmod(0o755)
    try:
        yield str(program)
    finally:
        for process in started:
            process.communicate()  # its input ends, so it ends


def received(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """What a program sent: its arguments, environment and folder; its standard streams."""
    streams = array.array("i")
    room = socket.CMSG_SPACE(3 * streams.itemsize)
    head, sent, _, _ = connection.recvmsg(8, room)
    for _, _, data in sent:
        streams.frombytes(data)
    text = b""
    while len(text) < int.from_bytes(head, "big"):
        text += connection.recv(1 << 16)
    return json.loads(text), list(streams)


def serve(listener: socket.socket) -> dict[str, Any] | None:
    """Fork for each program that connects, until the standard input ends: None. In a fork: what it is to run."""
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
    selector.register(listener, selectors.EVENT_READ)
    running: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor of a process
    while True:
        for key, _ in selector.select():
            if key.fd == sys.stdin.fileno():
                for process, _connection in running.values():
                    os.kill(process, signal.SIGKILL)
                    os.waitpid(process, 0)
                return None
            if key.fileobj is listener:
                connection, _ = listener.accept()
                _libraries()
                gc.freeze()  # a fork's collector need not look at what it shares
                order, streams = received(connection)
                process = os.fork()
                if not process:
                    selector.close()
                    for descriptor in [listener.detach(), connection.detach(), *running]:
                        os.close(descriptor)
                    for _, other in running.values():
                        other.close()
                    for number, stream in enumerate(streams):
                        os.dup2(stream, number)
                        os.close(stream)
                    return order
                for stream in streams:
                    os.close(stream)
                descriptor = os.pidfd_open(process)
                running[descriptor] = process, connection
                selector.register(descriptor, selectors.EVENT_READ)
                selector.register(connection, selectors.EVENT_READ, process)
            elif key.fd in running:
                process, connection = running.pop(key.fd)
                code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                selector.unregister(key.fd)
                os.close(key.fd)
                with contextlib.suppress(KeyError):
                    selector.unregister(connection)
                with contextlib.suppress(BrokenPipeError):
                    connection.sendall(str(code).encode())
                connection.close()
            elif key.data in [process for process, _ in running.values()]:  # the program was killed
                os.kill(key.data, signal.SIGKILL)
                selector.unregister(key.fileobj)


def _libraries() -> None:
    import bitsandbytes  # noqa: F401
    import peft  # noqa: F401
    from transformers import Gemma4ForConditionalGeneration  # noqa: F401


def main(number: str, program: str) -> None:
    import gemma4_compat  # noqa: F401  (before the others)

    order = serve(socket.socket(fileno=int(number)))
    if order is not None:
        os.environ.clear()
        os.environ.update(order["environment"])
        if os.environ.get("PYTHONWARNINGS") == "ignore":
            warnings.simplefilter("ignore")
        os.chdir(order["folder"])
        sys.executable = program
        sys.argv = order["arguments"]
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    # As an interpreter ends, but for taking the libraries apart, which takes longer than most scripts.
    os._exit(0 if order is None else _code(sys.argv[0]))


def _code(script: str) -> int:
    """The exit code of a script that is run as the main one."""
    code: object = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        code = error.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:  # noqa: BLE001  (an interpreter's last words)
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    main(*sys.argv[1:])
