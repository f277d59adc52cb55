"""``pytest -p gemma4_compat.pytest_plugin`` imports the shim before tests are collected, and fails a run in which a
patch that this environment needs is off.

A patch is off if, at the end, it has failed, is disabled or is reverted, not if no test imported its library. With
``gemma4_compat = arm`` in pytest's configuration the shim is only imported, and no run fails.
"""

from __future__ import annotations

from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._engine.patch import PatchState
from gemma4_compat._errors import printable
from gemma4_compat._needed import judge

_MODES = ("require", "arm")
_ON = (PatchState.APPLIED, PatchState.PENDING)
_OFF = (PatchState.FAILED, PatchState.REVERTED, PatchState.SKIPPED)
#: Key in the output of pytest-xdist's workers.
_OUTPUT = "gemma4_compat_off"
_FOUND: pytest.StashKey[dict[str, str]] = pytest.StashKey()


def _needed_and_off() -> dict[str, str]:
    """Patches that the installed releases need but that are off in this process: id -> state and reason."""
    needs = judge.assess(None, gemma4_compat.patches()).needs
    needed = {need.patch.id for need in needs if need.verdict is not judge.Verdict.NOT_NEEDED}
    statuses = gemma4_compat.status()
    off = [status for name, status in statuses.items() if name in needed and status.state in _OFF]
    return {status.id: f"{status.state}: {status.reason}" for status in off}


def pytest_addoption(parser: pytest.Parser) -> None:
    """The setting in pytest's configuration."""
    parser.addini("gemma4_compat", f"{' or '.join(_MODES)}: fail a run in which a needed patch is off", default="")


def pytest_configure(config: pytest.Config) -> None:
    """Check the setting."""
    mode = config.getini("gemma4_compat")
    if mode not in ("", *_MODES):
        raise pytest.UsageError(f"gemma4_compat = {mode!r} in {config.inipath}: write {' or '.join(_MODES)}")
    config.stash[_FOUND] = {}


def pytest_report_header() -> str:
    """Report the shim's version and how many patches are armed."""
    armed = [status for status in gemma4_compat.status().values() if status.state in _ON]
    return f"gemma4_compat: {gemma4_compat.__version__}, {len(armed)} patches armed"


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Check the patches, and fail a run that would otherwise pass."""
    config = session.config
    if config.getini("gemma4_compat") == "arm":
        return
    found = config.stash[_FOUND]
    found.update(_needed_and_off())
    if (output := getattr(config, "workeroutput", None)) is not None:
        output[_OUTPUT] = found
    elif found and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a worker of pytest-xdist found when it ends."""
    node.config.stash[_FOUND].update(getattr(node, "workeroutput", {}).get(_OUTPUT, {}))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """List the patches that are off."""
    found = config.stash[_FOUND]
    if not found:
        return
    terminalreporter.section(f"gemma4_compat: {len(found)} needed patches are off", sep="=", red=True)
    for name, reason in found.items():
        terminalreporter.line(f"{name}: {printable(reason)}", red=True)
    terminalreporter.line("`gemma4_compat = arm` in pytest's configuration lets such a run pass.")
