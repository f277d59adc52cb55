"""The command line: ``gemma4-compat doctor | status | run | list | explain | env | needed | ...``.

A command is a function of the module of its kind; importing the module adds it to the application (:mod:`app`).

* :mod:`doctor`, :mod:`check`: whether a defect is here. :mod:`patches`: ``status``, ``list``, ``explain``.
* :mod:`launch`: ``run``, ``enable``, ``disable``. :mod:`reports`: ``env``, ``reproduce``, ``needed``.
* :mod:`planning`: ``plan``, ``plan-training``. :mod:`adapters`: ``scan``, ``export``, ``merge``, ``repair``.
* :mod:`serve`: ``serve`` and ``chat``, which are in :mod:`serving`.
"""

from __future__ import annotations

import importlib
import io
import sys

from gemma4_compat import _startup
from gemma4_compat._engine.io import terminal
from gemma4_compat.cli.app import app, tell

# The order of --help.
_KINDS = ("doctor", "check", "patches", "launch", "reports", "planning", "serve", "adapters")
for _commands in _KINDS:
    importlib.import_module(f"gemma4_compat.cli.{_commands}")

__all__ = ["app", "main"]


def main() -> None:
    """Entry point of the ``gemma4-compat`` command. Exit codes: 0 good, 1 a defect remains, 2 bad usage.

    141 if the reader of a pipe is gone, as for a program that SIGPIPE ends.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # an encoding that lacks a character is not an error
    if _startup.refusal is not None:
        tell(_startup.refusal)
        raise SystemExit(2)
    try:
        app()
    except OSError as error:
        terminal.discard()
        tell(f"{error.filename or 'standard output'} cannot be used: {error.strerror or error}")
        raise SystemExit(2) from None
