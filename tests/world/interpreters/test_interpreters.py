"""The small case in every way; `python -m tests.world.interpreters` has the large one, and other interpreters."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.world.interpreters import run, ways

FAST = ("-O", "zipapp", "sub-interpreter")
# A program that PyInstaller froze is without the libraries, which are here; tests/unit/engine/test_frozen.py has one.
NAMES = [name for name in ways.WAYS if name not in ("python", "PyInstaller")]


@pytest.fixture(scope="module")
def samples(workspace: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samples")
    shutil.copytree(workspace.adapter("all"), folder / "adapter-all")
    run.write_requirements(folder)
    return folder


@pytest.fixture(scope="module")
def plain(samples: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    outcome, error = run.once(sys.executable, "python", "stub", samples, tmp_path_factory.mktemp("plain"))
    assert not error, outcome
    assert outcome["reverted"]
    assert not outcome["failed"]
    assert [said["exit"] for said in outcome["commands"].values()] == [0, 0, 0, 0, 2]
    return outcome


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.full) for name in NAMES]
)
def test_the_outcome_is_that_of_plain_python(samples: Path, plain: Any, tmp_path: Path, name: str) -> None:
    if name in ("fork", "forkserver") and sys.platform == "win32":
        pytest.skip("not on Windows")
    if name in ways.NEEDED:
        module, distributions = ways.NEEDED[name]
        pytest.importorskip(module, reason=f"needs {module}: pip install {distributions}")
    outcome, error = run.once(sys.executable, name, "stub", samples, tmp_path)
    assert not error, outcome
    assert run.difference(plain, outcome, documented=name != "-OO") == ""


def test_another_outcome_is_noticed(plain: Any) -> None:
    assert "reverted" in run.difference(plain, {**plain, "reverted": False})
    assert "commands" in run.difference(plain, {**plain, "commands": {}})
    assert "difference" in run.difference({**plain, "difference": 0.0}, {**plain, "difference": 1.0})
