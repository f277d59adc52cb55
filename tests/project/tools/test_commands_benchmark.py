"""benchmarks/shim/commands.py: every command has a row, and a run is measured as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.shim import commands
from gemma4_compat import cli

NAMES = {found.name or found.callback.__name__ for found in cli.app.registered_commands}  # type: ignore[union-attr]


def test_every_command_is_measured() -> None:
    measured = {arguments.split()[0] for name, arguments in commands.COMMANDS.items() if not name.startswith("wrong")}
    assert {name.replace("_", "-") for name in NAMES} - {"enable", "disable"} <= measured  # these change this Python


def test_arguments_of_several_words_and_places() -> None:
    assert commands.words("plan E2B --card RTX 3060", Path("out")) == ["plan", "E2B", "--card", "RTX 3060"]
    assert commands.words("repair MODEL OUT", Path("out")) == ["repair", str(commands.DATA / "model"), "out"]


@pytest.mark.parametrize("where", ["pipe", "terminal"])
def test_a_run_is_measured(where: str) -> None:
    if where == "terminal":
        pytest.importorskip("pty", reason="this system has no pseudo-terminals")
    found = commands.measured(["--version"], where, chats=False, serves=False, limit=60)
    assert (found["exit"], found["lines"]) == (0, 1)
    assert 0 < found["first_byte_s"] <= found["wall_s"]
    assert 0 <= found["first_byte_cpu_s"] <= found["cpu_s"]
    assert found["longest_silence_s"] >= found["first_byte_s"]
