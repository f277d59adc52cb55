"""A script in a fork of a process that has imported the libraries ends as one in an interpreter of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import Finished, child

pytestmark = pytest.mark.full
SCRIPTS = {
    "arguments and streams": "import sys; print(sys.argv[1:], __name__); print('said', file=sys.stderr)",
    "an exit code": "raise SystemExit(7)",
    "words at the end": "raise SystemExit('no such thing')",
    "an error": "def f():\n    raise ValueError('of the script')\nf()",
    "something at exit": "import atexit; atexit.register(print, 'last')",
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "a thread": "import threading, time; threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()",
    "what another one set": "import sys; print(hasattr(sys, 'mark')); sys.mark = 1",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_ends_as_in_an_interpreter(warm_child: Callable[..., Finished], tmp_path: Path, name: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPTS[name], encoding="utf-8")
    for _ in range(2):
        warm, real = warm_child(str(script), "one", "two"), child(str(script), "one", "two")
        assert (warm.code, warm.stdout) == (real.code, real.stdout)
        assert warm.stderr.splitlines()[-1:] == real.stderr.splitlines()[-1:]


def test_a_script_that_hangs_is_ended(warm_child: Callable[..., Finished], tmp_path: Path) -> None:
    script, mark = tmp_path / "script.py", tmp_path / "still here"
    script.write_text(f"import time; time.sleep(4); open({str(mark)!r}, 'w')", encoding="utf-8")
    with pytest.raises((subprocess.TimeoutExpired, pytest.fail.Exception)):
        warm_child(str(script), timeout=2)
    with pytest.raises((subprocess.TimeoutExpired, pytest.fail.Exception)):
        warm_child("-c", "import time; time.sleep(6)", timeout=4)  # by then it would have gone on
    assert not mark.exists()
