"""The pytest plugin, in runs of pytest of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gemma4_compat import patches
from gemma4_compat._needed import judge
from tests.helpers import Finished, child

GOOD = "import sys\nassert 'gemma4_compat' in sys.modules  # before collection\ndef test_it(): pass\n"
Pytest = Callable[..., Finished]
NEEDED = [
    need.patch.id for need in judge.assess(None, patches()).needs if need.verdict is judge.Verdict.NEEDED
]  # fmt: skip


@pytest.fixture
def run(tmp_path: Path, peft: Path) -> Pytest:
    """``run(*arguments, settings=..., test=...)``: pytest with the plugin; ``settings`` is its configuration."""
    if not NEEDED:
        pytest.skip("nothing is needed here: the libraries are not installed")

    def run(*arguments: str, settings: str = "", test: str = GOOD, conftest: str = "", disable: str = "") -> Finished:
        (tmp_path / "pytest.ini").write_text(f"[pytest]\n{settings}\n", encoding="utf-8")
        (tmp_path / "conftest.py").write_text(conftest, encoding="utf-8")
        (tmp_path / "test_it.py").write_text(test, encoding="utf-8")
        words = ["-p", "gemma4_compat.pytest_plugin", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", *arguments]
        environment = {"GEMMA4_COMPAT_DISABLE": disable, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        return child("-m", "pytest", *words, str(tmp_path), environment=environment)

    return run


def test_a_run_with_everything_on_is_what_it_is_without(run: Pytest) -> None:
    done = run()
    assert done.code == 0, done.stdout
    assert "\ngemma4_compat: 0.1.0, " in done.stdout
    assert "needed patches are off" not in done.stdout


@pytest.mark.full
def test_with_the_library_itself(run: Pytest) -> None:
    done = run(test="def test_it(): import peft\n")
    assert (done.code, "needed patches are off" in done.stdout) == (0, False)
    assert run(test="def test_it(): assert 0").code == 1


@pytest.mark.parametrize("workers", [[], pytest.param(["-p", "xdist", "-n", "1"], marks=pytest.mark.full)])
def test_a_needed_patch_that_is_disabled_fails_the_run(run: Pytest, workers: list[str]) -> None:
    done = run(*workers, disable=NEEDED[0])
    assert done.code == 1
    assert "gemma4_compat: 1 needed patches are off" in done.stdout
    assert f"\n{NEEDED[0]}: skipped: disabled by GEMMA4_COMPAT_DISABLE\n" in done.stdout
    assert "1 passed" in done.stdout


def test_one_that_is_not_needed_does_not(run: Pytest) -> None:
    others = ",".join(patch.id for patch in patches() if patch.id not in NEEDED)
    assert run(disable=others).code == 0


def test_one_that_a_test_has_reverted_fails_the_run(run: Pytest) -> None:
    test = f"import gemma4_compat\ndef test_it(): gemma4_compat.revert({NEEDED[0]!r})\n"
    done = run(test=test)
    assert (done.code, f"\n{NEEDED[0]}: reverted: " in done.stdout) == (1, True)
    assert run(test=test + "def test_again(): gemma4_compat.install()\n").code == 0


@pytest.mark.filterwarnings("ignore")
def test_one_that_could_not_be_applied_fails_the_run(run: Pytest, peft: Path) -> None:
    """An empty package in the place of peft has nothing of what is repaired."""
    done = run(conftest=f"import sys; sys.path.insert(0, {str(peft)!r})", test="def test_it(): import peft\n")
    assert done.code == 1
    failed = [name for name in NEEDED if f"\n{name}: failed: " in done.stdout]
    assert failed
    assert all(name.startswith("peft-") for name in failed)


def test_arm_only(run: Pytest) -> None:
    done = run(settings="gemma4_compat = arm", disable=NEEDED[0])
    assert (done.code, "are off" in done.stdout) == (0, False)


def test_a_setting_that_is_none(run: Pytest, tmp_path: Path) -> None:
    done = run(settings="gemma4_compat = yes")
    assert done.code == 4
    assert f"gemma4_compat = 'yes' in {tmp_path / 'pytest.ini'}: write require or arm" in done.stderr
