"""Keep ``python -m gemma4_compat`` from importing files of the working directory; runs before any other import.

``python -m`` puts the working directory before the standard library. Started in the folder of a downloaded adapter
that contains a ``json.py``, the command would run that file. The ``gemma4-compat`` script does not search there.
"""

from __future__ import annotations

import os
import sys

_COMMAND = __name__.partition(".")[0]
_SCRIPTS = ("gemma4-compat", "gemma4-compat.exe", "gemma4-compat-script.py")

#: The problem with the settings, for the command line to print as one line instead of a traceback.
refusal: str | None = None


def is_command_line() -> bool:
    """Whether this process is the ``gemma4-compat`` command."""
    if sys.argv[:1] == ["-m"]:
        return _module() == _COMMAND
    folder, _, name = (sys.argv or [""])[0].replace(os.sep, "/").rpartition("/")
    # With -m, Python has put the file there once it has found the module.
    return name in _SCRIPTS or (name == "__main__.py" and folder.rpartition("/")[2] == _COMMAND)


def _module() -> str:
    """The module that ``-m`` names on the command line of this process."""
    at = next((index for index, argument in enumerate(sys.orig_argv) if argument.startswith("-m")), None)
    return "" if at is None else sys.orig_argv[at][2:] or sys.orig_argv[at + 1]


def leave_working_directory_out() -> None:
    """Remove the working directory from ``sys.path`` in a process that runs a command of this package, unless the
    package itself is there.
    """
    # Python puts "-m" there until it has found the module.
    if sys.argv[:1] != ["-m"] or not sys.path or sys.flags.isolated or getattr(sys.flags, "safe_path", False):
        return
    module = _module()
    if module != _COMMAND and not module.startswith(f"{_COMMAND}."):
        return
    package = os.path.realpath(os.path.dirname(os.path.dirname(__file__)))  # noqa: PTH120 - pathlib is not loaded
    try:
        here = os.path.realpath(os.getcwd())  # noqa: PTH109 - likewise
    except OSError:  # the folder is gone, so nothing is imported from it
        return
    if os.path.realpath(sys.path[0]) == here != package:
        del sys.path[0]


leave_working_directory_out()
