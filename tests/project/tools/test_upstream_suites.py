"""tools/upstream_suites.py on suites made here: what it counts, what it calls a difference, what it refuses."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tools import upstream_child, upstream_suites

ROOT = Path(__file__).resolve().parents[3]
FILE = "tests/test_upstream.py"
UPSTREAM = """
import os
import pytest

def test_same(): pass
def test_fails(): raise KeyError("x")
@pytest.mark.skip
def test_skipped(): pass
@pytest.mark.xfail(strict=True)
def test_known(): assert False
@pytest.fixture
def broken(): raise OSError
def test_setup(broken): pass
def test_hub():
    class OfflineModeIsEnabled(Exception): pass
    try:
        raise OfflineModeIsEnabled
    except OfflineModeIsEnabled as error:
        raise ValueError("no such model") from error
def test_slow(): raise AssertionError("is deselected")
"""
DIFFERENT = """
def test_different(): assert os.environ.get("GEMMA4_COMPAT_DISABLE") == "all"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "fake-1.0"
    (made / "tests").mkdir(parents=True)
    return made


def fake(**options: Any) -> Any:
    return upstream_suites.Suite(**{"name": "fake", "files": {FILE: 1}, **options})


def ran(outcomes: Mapping[str, str], *, shim: str, **options: Any) -> dict[str, Any]:
    """The result of a process in which all was well, but for ``options``."""
    result = {
        "gemma4_compat": "0",
        "exit code": 0,
        "wall_s": 1,
        "collected": len(outcomes),
        "sampled out": 0,
        "deselected": {},
        "outcomes": outcomes,
        "through": {"a-patch": 1} if shim == "on" else {},
        "states": {"a-patch": ["applied" if shim == "on" else "skipped", "because"]},
        "overridden": {},
    }
    return {**result, **options}


def complaints(suite: Any, off: dict[str, Any], on: dict[str, Any]) -> list[str]:
    return list(upstream_suites.problems(suite, upstream_suites.compare(off["outcomes"], on["outcomes"]), off, on))


# Two processes


@pytest.mark.full
def test_a_suite_is_run_twice_and_the_difference_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_suites, "RERUNS", 1)
    (folder / FILE).write_text(UPSTREAM + DIFFERENT, encoding="utf-8")
    suite = fake(deselected={"*::test_slow": "it is slow"}, not_run={"tests/test_gpu.py": "needs a GPU"})
    (folder / "tests" / "test_gpu.py").write_text("", encoding="utf-8")
    (folder / "tests" / "test_new.py").write_text("", encoding="utf-8")
    result, wrong = upstream_suites.twice(suite, folder, refuse_hub=False)
    assert result["collected"] == 8
    assert result["deselected because"] == {"*::test_slow": {"reason": "it is slow", "tests": 1}}
    assert result["outcomes"]["off"] == {
        "passed": 2, "failed": 1, "skipped": 1, "xfailed": 1, "error in setup": 1, upstream_child.NEEDS_HUB: 1,
    }  # fmt: skip
    assert result["executed"] == 5
    assert result["identical"] == 4
    assert result["different"] == {
        f"{FILE}::test_different": {"off": ["passed"] * 2, "on": ["failed: AssertionError"] * 2}
    }
    assert result["failed off and on"] == {
        f"{FILE}::test_fails": "failed: KeyError",
        f"{FILE}::test_setup": "error in setup: OSError",
    }
    assert result["files not run"] == {"tests/test_gpu.py": "needs a GPU", "tests/test_new.py": "not in the table"}
    assert wrong[0].startswith(f"{FILE}::test_different: off ['passed'")
    # No library was imported: such a run proves nothing, and says so.
    assert "no patch was applied with the shim on" in wrong
    assert "no test went through a repaired function" in wrong


def test_a_file_that_cannot_be_collected_fails_the_run_and_not_the_other_files(folder: Path) -> None:
    (folder / FILE).write_text("def test_same(): pass\n", encoding="utf-8")
    (folder / "tests" / "test_broken.py").write_text("import no_such_module_anywhere\n", encoding="utf-8")
    suite = fake(files={FILE: 1, "tests/test_broken.py": 1, "tests/test_of_another_release.py": 1})
    result, wrong = upstream_suites.twice(suite, folder, refuse_hub=False)
    assert result["executed"] == 1
    assert "tests/test_broken.py: cannot be collected, shim off" in wrong
    assert "tests/test_of_another_release.py" not in result["files"]


# Comparing


def test_a_test_of_one_run_only_is_a_difference() -> None:
    found = upstream_suites.compare({"a": "passed", "b": "passed"}, {"a": "passed"})
    assert found.differences == {"b": {"off": ["passed"], "on": ["absent"]}}
    assert (found.executed, found.identical) == (2, 1)


def test_another_exception_is_a_difference() -> None:
    assert upstream_suites.compare({"a": "failed: KeyError"}, {"a": "failed: TypeError"}).differences


@pytest.mark.parametrize("outcome", ["skipped", "needs the hub"])
def test_what_did_not_run_is_compared_but_not_counted(outcome: str) -> None:
    assert upstream_suites.compare({"a": outcome}, {"a": outcome}).executed == 0
    found = upstream_suites.compare({"a": outcome}, {"a": "passed"})
    assert (found.executed, found.identical, list(found.differences)) == (1, 0, ["a"])


@pytest.mark.parametrize(
    "later_off, later_on, flaky",
    [
        (["failed", "passed"], ["failed", "failed"], True),
        (["passed", "passed"], ["passed", "passed"], False),  # only ever seen with the shim on
        (["passed", "passed"], ["failed", "passed"], False),
        (["failed", "passed"], ["failed", "error"], False),
    ],
)
def test_flaky_is_only_what_the_runs_without_the_shim_show_to_be(
    later_off: list[str], later_on: list[str], flaky: bool
) -> None:
    later = {"off": iter(later_off), "on": iter(later_on)}
    asked: list[list[str]] = []

    def rerun(mode: str, nodeids: list[str]) -> dict[str, str]:
        asked.append(nodeids)
        return {"a": next(later[mode])}

    found = upstream_suites.compare({"a": "passed", "b": "passed"}, {"a": "failed", "b": "passed"}, rerun)
    assert asked == [["a"]] * 4
    assert bool(found.flaky) is flaky
    assert bool(found.differences) is not flaky
    assert found.identical == 1


def test_phases_and_subtests_make_one_outcome() -> None:
    outcome = upstream_child.NOTHING_YET
    for phase in ("passed", "failed: KeyError", "failed: KeyError", "passed", "error in teardown: OSError"):
        outcome = upstream_child.joined(outcome, phase)
    assert outcome == "failed: KeyError, error in teardown: OSError"


# What fails a run


def test_a_good_run_has_no_problems() -> None:
    off, on = (ran({"a": "passed"}, shim=mode) for mode in ("off", "on"))
    assert complaints(fake(), off, on) == []


@pytest.mark.parametrize(
    "mode, option, said",
    [
        ("on", {"states": {"a-patch": ["failed", "unknown code"]}}, "a-patch failed to apply: unknown code"),
        ("on", {"through": {}}, "no test went through a repaired function"),
        ("on", {"overridden": {"a-patch": ["x.y"]}}, "a-patch: x.y were replaced by somebody else"),
        ("on", {"exit code": 3}, "pytest ended with 3, shim on"),
        ("off", {"states": {"a-patch": ["applied", "."]}}, "a-patch is applied with the shim off"),
        ("off", {"through": {"a-patch": 1}}, "repaired functions were called with the shim off: a-patch"),
        ("on", {"outcomes": {"a": "skipped"}}, "a: off ['passed'], on ['skipped']"),
    ],
)
def test_every_other_run_says_why_it_is_no_proof(mode: str, option: dict[str, Any], said: str) -> None:
    both = {name: ran({"a": "passed"}, shim=name) for name in ("off", "on")}
    both[mode] |= option
    assert said in complaints(fake(), both["off"], both["on"])


def test_an_expected_difference_is_accepted_until_it_is_gone() -> None:
    suite = fake(expected_differences={"*::test_raises[[]0]": "it is repaired"})
    name = f"{FILE}::test_raises[[]0]"
    off = ran({name: "passed"}, shim="off")
    assert complaints(suite, off, ran({name: "failed: AssertionError"}, shim="on")) == []
    assert complaints(suite, off, ran({name: "passed"}, shim="on")) == [
        "*::test_raises[[]0] is an expected difference (it is repaired) but does not differ any more"
    ]
    other = ran({"a": "passed"}, shim="off")
    assert complaints(suite, other, ran({"a": "passed"}, shim="on")) == []  # not in this release or sample


# What is run


def test_patterns_know_only_the_star() -> None:
    patterns = {"a.py::T::test[*-x]": "", "b.py*": ""}
    assert upstream_child.matching(patterns, "a.py::T::test[1-x]") == "a.py::T::test[*-x]"
    assert upstream_child.matching(patterns, "a_py::T::test[1-x]") is None
    assert upstream_child.matching(patterns, "b.py::anything\nat all") == "b.py*"


def test_the_sample_is_fixed_and_of_about_the_size_asked_for() -> None:
    names = [f"tests/test_x.py::test[{number}]" for number in range(2000)]
    sample = [name for name in names if upstream_child.in_sample(name, 20)]
    assert 70 < len(sample) < 130
    assert all(upstream_child.in_sample(name, 1) for name in names)
    assert all(upstream_child.in_sample(name, 10) for name in sample)  # a finer sample is part of a coarser one
    assert sample[0] == "tests/test_x.py::test[3]"  # as on every other machine


def test_a_python_that_checks_no_paths_unpacks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    with pytest.raises(SystemExit, match=r"use 3\.10\.12, 3\.11\.4 or newer"):
        upstream_suites.unpack(tmp_path / "fake-1.0.tar.gz", tmp_path, package=False)


@pytest.mark.skipif(not hasattr(tarfile, "data_filter"), reason="this Python has no tarfile.data_filter")
def test_only_the_tests_are_unpacked_and_nothing_outside(tmp_path: Path) -> None:
    archive = tmp_path / "fake-1.0.tar.gz"
    with tarfile.open(archive, "w:gz") as opened:
        for name in ("fake-1.0/src/fake.py", "fake-1.0/tests/test_a.py"):
            opened.addfile(tarfile.TarInfo(name), io.BytesIO(b""))
    upstream_suites.unpack(archive, tmp_path / "cache", package=True)
    found = {str(path.relative_to(tmp_path / "cache")) for path in (tmp_path / "cache").rglob("*.*")}
    assert found == {"fake-1.0", "fake-1.0/tests/test_a.py", "fake-1.0/tests/__init__.py"}
    with tarfile.open(archive, "w:gz") as opened:
        opened.addfile(tarfile.TarInfo("fake-1.0/tests/../../../out.py"), io.BytesIO(b""))
    with pytest.raises(tarfile.OutsideDestinationError):
        upstream_suites.unpack(archive, tmp_path / "cache", package=False)


def test_a_source_distribution_with_another_hash_is_refused(tmp_path: Path) -> None:
    (tmp_path / "downloads").mkdir()
    (tmp_path / "downloads" / "fake-1.0.tar.gz").write_bytes(b"something else")
    with pytest.raises(SystemExit, match=r"fake-1.0.tar.gz has the SHA-256 .* delete it"):
        upstream_suites.fetch(fake(sha256={"1.0": "0" * 64}), "1.0", tmp_path)


def test_the_table_is_read_and_gives_a_reason_for_everything_left_out() -> None:
    for suite in upstream_suites.read_suites(upstream_suites.TABLE).values():
        assert suite.files
        assert not set(suite.files) & set(suite.not_run)
        for reasons in (suite.not_run, suite.deselected, suite.expected_differences):
            assert all(reasons.values()), suite.name
        assert replace(suite) == suite


RUNS = sorted((ROOT / "docs" / "evidence" / "upstream").glob("*.json"))


@pytest.mark.parametrize("file", RUNS, ids=lambda file: file.stem)
def test_the_committed_results_are_a_proof(file: Path) -> None:
    run = json.loads(file.read_text(encoding="utf-8"))
    assert run["problems"] == []
    assert run["identical"] >= 1000
    assert run["executed"] == sum(result["executed"] for result in run["suites"].values())
    for name, result in run["suites"].items():
        pinned = upstream_suites.read_suites(upstream_suites.TABLE)[name]
        assert result["version"] == run["versions"][name]
        assert result["sha256"] == pinned.sha256[result["version"]]
