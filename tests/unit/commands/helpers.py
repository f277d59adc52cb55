"""Commands in processes of their own: started in a folder, killed, without a standard output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def started(
    *arguments: str, folder: Path | None = None, environment: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[str]:
    """Start this interpreter with ``arguments``, in ``folder``, as from a terminal: also where the tests are run by
    ``nohup``, whose children ignore SIGHUP.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GEMMA4_COMPAT_")}
    path = os.pathsep.join(filter(None, [str(ROOT), inherited.get("PYTHONPATH", "")]))
    changes = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"} | dict(environment or {})
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    if hasattr(signal, "SIGHUP"):
        streams.setdefault("preexec_fn", lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=folder, env=inherited | changes, text=True, errors="replace", **streams
    )


def finished(process: subprocess.Popen[str], timeout: float = 60) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    out, error = process.communicate(timeout=timeout)
    return process.returncode, out, error


def command(*arguments: str, **options: Any) -> tuple[int, str, str]:
    """``python -m gemma4_compat`` with ``arguments``."""
    return finished(started("-m", "gemma4_compat", *arguments, **options))
