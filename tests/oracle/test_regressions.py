"""Placements that failed once do not fail again; one of the scripts is run as a user would run it."""

from __future__ import annotations

import dataclasses
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.search import run
from tests.search.case import as_script, generate

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "tests" / "regressions").glob("*.py"))


def run_script(path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, str(path)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_it_holds_now(path: Path, bench: run.Bench) -> None:
    failure = run.check(runpy.run_path(str(path))["CASE"], bench)
    assert failure is None, failure.detail


def test_a_script_that_holds_exits_0() -> None:
    pytest.importorskip("bitsandbytes", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")
    done = run_script(SCRIPTS[0])
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_script_that_does_not_hold_says_what_is_wrong(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")
    script = tmp_path / "planted.py"
    # A map that leaves modules out is refused.
    incomplete = (("lm_head", "main"), ("model.norm", "offloaded"))
    case = dataclasses.replace(generate(0), load="dispatch_model", placement=incomplete)
    script.write_text(as_script(case, "planted: the map leaves modules out"), encoding="utf-8")
    done = run_script(script)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "gives no device" in done.stderr
