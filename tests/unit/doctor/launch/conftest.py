"""Programs, with the shim and without, and a library that costs nothing to import."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.commands.helpers import finished, started

RUN = ("-m", "gemma4_compat", "run")
#: Says whether the shim is there once a library is imported, and that it was not before.
REPORT = """
import sys
before = "gemma4_compat" in sys.modules
import peft
print("armed" if "gemma4_compat" in sys.modules and not before else "not armed", flush=True)
"""


@pytest.fixture(scope="session")
def peft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a package ``peft`` that has nothing in it."""
    folder = tmp_path_factory.mktemp("libraries")
    (folder / "peft").mkdir()
    (folder / "peft" / "__init__.py").write_text("", encoding="utf-8")
    return folder


@pytest.fixture
def with_run(peft: Path, tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """``with_run(*words)``: exit code, output and errors of ``gemma4-compat run WORDS``, with that :func:`peft`."""

    def run(*words: str, **options: Any) -> tuple[int, str, str]:
        environment = {"PYTHONPATH": f"{peft}:{Path(__file__).parents[4]}"} | options.pop("environment", {})
        return finished(started(*RUN, *words, environment=environment, folder=tmp_path, **options))

    return run


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """``script(text)``: the path of a program."""

    def write(text: str, name: str = "program.py") -> str:
        file = tmp_path / name
        file.write_text(text, encoding="utf-8")
        return str(file)

    return write


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with nothing in it."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=240)
    return folder / "bin" / "python"
