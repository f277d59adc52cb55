"""Scripts run in forks of a process that has imported the libraries."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gemma4_compat._doctor import children
from tests import warm
from tests.helpers import ROOT, Finished, child


@pytest.fixture(scope="session")
def warm_child() -> Iterator[Callable[..., Finished]]:
    """:func:`tests.helpers.child` for scripts that import the libraries, in forks where these are safe."""
    with contextlib.ExitStack() as stack:
        python = sys.executable
        if children.can_fork():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warm-")))
            inherited = {name: value for name, value in os.environ.items() if not name.startswith("GEMMA4_COMPAT_")}
            inherited.pop("PYTHONWARNINGS", None)
            path = os.pathsep.join(filter(None, [str(ROOT), inherited.get("PYTHONPATH")]))
            environment = inherited | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
            python = stack.enter_context(warm.interpreter(folder, environment))
        yield functools.partial(child, python=python)
