"""Before anything else is imported: what ``python -m gemma4_compat`` imports is not in the folder it is started in.

``python -m`` puts the working directory before the standard library. Started in the folder of a downloaded adapter,
with a ``json.py`` beside it, the command would run that file. The ``gemma4-compat`` script does not search there.
"""

from __future__ import annotations

import os
import sys

_COMMAND = __name__.partition(".")[0]


def leave_working_directory_out() -> None:
    """Take the working directory from ``sys.path`` in a process that is started as a command of this package, unless
    the package itself is there.
    """
    # Python has "-m" there until it has found the module.
    if sys.argv[:1] != ["-m"] or not sys.path or sys.flags.isolated or getattr(sys.flags, "safe_path", False):
        return
    at = next((index for index, argument in enumerate(sys.orig_argv) if argument.startswith("-m")), None)
    module = "" if at is None else sys.orig_argv[at][2:] or sys.orig_argv[at + 1]
    if module != _COMMAND and not module.startswith(f"{_COMMAND}."):
        return
    package = os.path.realpath(os.path.dirname(os.path.dirname(__file__)))  # noqa: PTH120 - pathlib is not loaded
    try:
        here = os.path.realpath(os.getcwd())  # noqa: PTH109 - likewise
    except OSError:  # it is gone: nothing is imported from it
        return
    if os.path.realpath(sys.path[0]) == here != package:
        del sys.path[0]


leave_working_directory_out()
