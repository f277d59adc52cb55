"""``gemma4-compat run``: a program in place of this process, with the shim in it and in what it starts.

The program and its children inherit a ``PYTHONPATH`` that begins with a folder of this package. Each Python among them
imports ``sitecustomize`` from there, which arms the shim and goes on to that Python's own.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from gemma4_compat._doctor.launch import environment
from gemma4_compat._errors import Gemma4CompatError

#: Exit codes of a shell for a command that is not there, or cannot be executed.
NOT_FOUND, NOT_EXECUTABLE = 127, 126

_WINDOWS = os.name == "nt"
_PYTHON = re.compile(r"(python|pypy)[\d.]*(\.exe)?", re.IGNORECASE)
#: Options of Python that keep it from reading PYTHONPATH, or from looking for sitecustomize.
_DEAF = {"I": "-I", "E": "-E", "S": "-S"}


class CannotStartError(Gemma4CompatError):
    """The program does not exist or cannot be executed; ``code`` is the exit code that a shell would give."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def command_line(words: Sequence[str]) -> list[str]:
    """What to start for the words after ``run``: a program, or this Python with a script, a module or its options.

    Raises:
        CannotStartError: the program does not exist.
    """
    first = words[0]
    if first.startswith("-") or _is_script(first):
        return [_this_python(), *_own_options(sys.orig_argv, sys.argv), *words]
    if shutil.which(first) is None:
        is_path = Path(first).name != first
        beside = None if is_path else shutil.which(first, path=str(Path(sys.executable).parent))
        if beside is not None:  # an environment that is not activated
            return [beside, *words[1:]]
        if is_path and Path(first).exists():
            raise CannotStartError(f"{first!r} cannot be executed", NOT_EXECUTABLE)
        raise CannotStartError(f"there is no program {first!r} on PATH", NOT_FOUND)
    return list(words)


def search_path(environ: Mapping[str, str]) -> str:
    """``PYTHONPATH`` for the program.

    Raises:
        Gemma4CompatError: this package is in a folder whose name cannot be in that variable.
    """
    folder, before = str(environment.HOOK), environ.get("PYTHONPATH", "")
    if os.pathsep in folder:
        raise Gemma4CompatError(
            f"gemma4_compat is installed in {folder!r}, and PYTHONPATH cannot name a folder with {os.pathsep!r}; "
            "install it elsewhere"
        )
    if folder in before.split(os.pathsep):
        return before
    return folder + (os.pathsep + before if before else "")


def execute(words: Sequence[str]) -> int:
    """Become the program; on Windows, which cannot, its exit code.

    Raises:
        CannotStartError: the program does not exist.
        Gemma4CompatError: it is a Python that would not read what arms the shim.
    """
    command = command_line(words)
    file = shutil.which(command[0]) or command[0]
    _refuse_deaf(file, command)
    environ = {**os.environ, "PYTHONPATH": search_path(os.environ)}
    if _WINDOWS:
        return subprocess.run([file, *command[1:]], env=environ, check=False).returncode
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them, and the program would inherit that
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        _become(file, command, environ)
    except OSError as error:
        raise CannotStartError(f"{command[0]!r} cannot be executed: {error.strerror}", NOT_EXECUTABLE) from error


def _become(file: str, command: list[str], environ: Mapping[str, str]) -> NoReturn:
    try:
        os.execve(file, command, environ)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
    os.execve("/bin/sh", ["/bin/sh", file, *command[1:]], environ)  # no `#!` line: what a shell does


def _this_python() -> str:
    if not sys.executable:
        raise Gemma4CompatError("this Python does not know its own executable; write it: gemma4-compat run python ...")
    return sys.executable


def _is_script(word: str) -> bool:
    """Whether Python runs it: a file by its name, or a folder or archive with ``__main__.py``."""
    if word.endswith((".py", ".pyw", ".pyz")):
        return Path(word).exists() or shutil.which(word) is None  # Python reports that it does not exist
    return Path(word, "__main__.py").is_file()


def _own_options(typed: Sequence[str], arguments: Sequence[str]) -> list[str]:
    """``-u -X dev`` of ``python -u -X dev -m gemma4_compat run ...``: options meant for the program as well."""
    options = list(typed[1 : len(typed) - len(arguments) + 1])
    if options and options[-1] == "gemma4_compat":
        options.pop()
    elif not options or not options[-1].endswith("mgemma4_compat"):
        return []  # started as a script, whose first line says what is good for this package
    last = options.pop().removesuffix("gemma4_compat").removesuffix("m") if options else ""
    return [*options, last] if last not in ("", "-") else options


def _refuse_deaf(file: str, command: Sequence[str]) -> None:
    """Raise for a Python that is told to read neither PYTHONPATH nor sitecustomize."""
    deaf = _deaf_option(command[1:] if _PYTHON.fullmatch(Path(file).name) else _first_line(Path(file)))
    if deaf is None or (deaf != "-S" and environment.state().enabled):
        return
    remedy = "leave it out" + ("" if deaf == "-S" else ", or arm the whole environment: gemma4-compat enable")
    raise Gemma4CompatError(f"{command[0]!r} with the option {deaf} of Python would not see the shim; {remedy}")


def _first_line(file: Path) -> list[str]:
    """Options of Python in a script's ``#!`` line."""
    try:
        with file.open("rb") as opened:
            line = opened.readline(512).decode("utf-8", "replace")
    except OSError:  # one that may be executed and not read
        return []
    words = line[2:].split() if line.startswith("#!") else []
    return words[1:] if words and _PYTHON.fullmatch(Path(words[0]).name) else []


def _deaf_option(options: Sequence[str]) -> str | None:
    """The first of -I, -E and -S among options of Python; what follows is the program's."""
    words = iter(options)
    for word in words:
        if not word.startswith("-") or word in ("-", "--"):
            return None
        if word.startswith("--"):
            if word == "--check-hash-based-pycs":
                next(words, None)
            continue
        for place, letter in enumerate(word[1:], 2):
            if letter in _DEAF:
                return _DEAF[letter]
            if letter in "cm":
                return None
            if letter in "WX":
                if place == len(word):
                    next(words, None)
                break
    return None
