"""README's tests cost what it says; each file of the package has its tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import durations, tiers
from tests.helpers import ROOT, child

PROMISE = "test_with_the_patch_it_is_gone"
COSTS = {
    "tests/test_a.py": {"": [1.0, 2.0, 2], "test_short": [0.5, 0.5, 1], "test_grid": [1.0, 9.0, 9]},
    "tests/test_b.py": {"": [1.0, 2.0, 2], "test_long": [30.0, 30.0, 1]},
    "tests/test_c.py": {"": [20.0, 40.0, 2], "test_shortest": [0.1, 0.1, 1]},
}


def chosen(seconds: float, *first: str) -> dict[str, dict[str, bool]]:
    tier = tiers.quick(COSTS, tiers.START + seconds, first)
    assert first or tiers.seconds(tier, COSTS) <= tiers.START + seconds
    return {Path(file).stem[-1]: dict(names) for file, names in tier.items()}


def test_the_shortest_come_first_then_every_case() -> None:
    assert chosen(0.0) == {}
    assert chosen(2.5) == {"a": {"test_short": True}}  # two processes import its file
    assert chosen(3.5) == {"a": {"test_short": True, "test_grid": False}}
    assert chosen(11.5) == {"a": {"test_short": True, "test_grid": True}}
    assert chosen(1000.0) == {"a": {"test_short": True, "test_grid": True}, "b": {"test_long": True}}


def test_what_is_declared_is_in_it_whatever_it_costs() -> None:
    assert chosen(0.0, "*::test_grid") == {"a": {"test_grid": True}}
    assert chosen(5.0, "tests/test_c.py::*") == {"c": {"test_shortest": True}}


def test_every_file_was_recorded() -> None:
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    assert files == set(durations.read()), "python -m pytest -n 2 --record"


def test_the_quick_tests_stay_within_their_budget() -> None:
    costs = durations.read()
    tier = tiers.quick(costs)
    assert tiers.seconds(tier, costs) <= tiers.BUDGET, "what is in FIRST costs more: leave something out of it"
    assert tiers.collecting(tier, costs) <= tiers.COLLECTING
    declared = tiers.quick(costs, budget=0.0)
    assert tiers.seconds(declared, costs) <= tiers.BUDGET * 2 / 3, "little room is left for other tests"
    every = sum(costs[file][name][1] for file in costs for name in costs[file] if name)
    assert "about five minutes" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert tiers.BUDGET / tiers.PROCESSES == 5 * 60
    assert "three quarters of an hour" in (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    assert 35 * 60 < every / tiers.PROCESSES < 45 * 60
    assert {file for file, names in costs.items() if f"TestPromise::{PROMISE}" in names} <= set(tier)


def test_each_file_of_the_repository_has_its_tests() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a checkout of git")
    names = listed.stdout.splitlines()
    for name in names:
        if name.startswith(("gemma4_compat/", "tests/unit/", "tools/", "docs/")):
            assert any((ROOT / path).exists() for path in tiers.of_a_file(name)), name
    found = {path for name in names if name.startswith("gemma4_compat/") for path in tiers.of_a_file(name)}
    rooms = {path.parent.name for path in (ROOT / "tests" / "unit").glob("*/__init__.py")}
    assert {Path(path).parts[2] for path in found if path.startswith("tests/unit/")} == rooms
    assert tiers.of_a_file("gemma4_compat/patches/adapters/peft_x.py")[0] == "tests/patches/adapters/test_peft_x.py"


@pytest.mark.full
def test_what_is_not_quick_is_not_imported() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:]
    found = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert found == set(tiers.quick(durations.read()))


def test_an_unknown_commit_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="what changed since nowhere, which says: fatal: bad revision"):
        tiers.changed(ROOT, "nowhere")
    with pytest.raises(ValueError, match=r"--changed asks git .*not a git repository"):
        tiers.changed(tmp_path, "HEAD")


def test_no_file_of_tests_does_anything_long_when_it_is_imported() -> None:
    """Every process of pytest imports them. Some of the 0.7 s are Python's, which compiles a file and its helpers."""
    pytest.importorskip("bitsandbytes", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")
    done = child("-W", "ignore", "-c", _IMPORTS, timeout=600)
    slow = {name: took for name, took in done.data.items() if took > 0.7}
    assert slow == {}, "CPU seconds"


_IMPORTS = """
import importlib, json, pathlib, time
import bitsandbytes, hypothesis, peft, pytest, transformers, typer.testing
import tests.conftest

seconds = {}
for path in sorted(pathlib.Path(tests.conftest.__file__).parent.rglob("test_*.py")):
    name = ".".join(path.with_suffix("").relative_to(tests.conftest.ROOT).parts)
    began = time.process_time()
    try:
        importlib.import_module(name)
    except pytest.skip.Exception:
        pass  # another test of the same file says which package it needs
    seconds[name] = time.process_time() - began
print(json.dumps(seconds))
"""
