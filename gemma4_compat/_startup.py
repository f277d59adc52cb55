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
    arguments = sys.orig_argv
    if "-m" not in arguments or not sys.path or sys.flags.isolated or getattr(sys.flags, "safe_path", False):
        return
    module = "".join(arguments[arguments.index("-m") + 1 :][:1])
    if module != _COMMAND and not module.startswith(f"{_COMMAND}."):
        return
    here, first = os.path.realpath(os.getcwd()), os.path.realpath(sys.path[0])  # noqa: PTH109 - pathlib is not loaded
    package = os.path.realpath(os.path.dirname(os.path.dirname(__file__)))  # noqa: PTH120 - likewise
    if first == here != package:
        del sys.path[0]


leave_working_directory_out()
