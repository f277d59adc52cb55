"""How commands behave on a terminal, and in their help: columns, colours, completion, no words of the framework."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from gemma4_compat import cli
from gemma4_compat._engine.io import terminal
from gemma4_compat._engine.io.text import paragraphs, table_text, wrapped
from tests.unit.commands.helpers import command, started

COMMANDS = sorted(found.name or found.callback.__name__ for found in cli.app.registered_commands)  # type: ignore[union-attr]
ANSI = re.compile(r"\x1b\[\d+m")


def on_a_terminal(*arguments: str, columns: int = 80, environment: dict[str, str] | None = None) -> str:
    """What a command prints on a terminal."""
    pty = pytest.importorskip("pty", reason="this system has no pseudo-terminals")
    ours, theirs = pty.openpty()
    changes = {"COLUMNS": str(columns), "TERM": "xterm", "NO_COLOR": ""} | (environment or {})
    process = started("-m", "gemma4_compat", *arguments, stdout=theirs, stderr=theirs, environment=changes)
    os.close(theirs)
    said = b""
    try:
        while chunk := os.read(ours, 1 << 16):
            said += chunk
    except OSError:  # Linux: the other end is closed
        pass
    os.close(ours)
    process.wait(60)
    return said.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize(
    "arguments", [["status", "-v"], ["status"], ["list"], ["needed", "-v"], ["needed"], ["explain", "KeyError: 3"]]
)
def test_a_line_fits_the_terminal(arguments: list[str], columns: int) -> None:
    lines = ANSI.sub("", on_a_terminal(*arguments, columns=columns)).split("\n")
    assert len(lines) > 5
    # What cannot be broken, a path or an address, may be longer.
    assert [line for line in lines if len(line) > columns and len(line.split()[-1]) < columns - 40] == []


def test_a_pipe_gets_a_line_for_each_row_and_no_colours() -> None:
    code, out, _ = command("status", environment={"COLUMNS": "40", "TERM": "xterm"})
    assert code == 0
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) > 80


@pytest.mark.parametrize("environment, coloured", [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_words_for_states_are_coloured_on_a_terminal_that_can(environment: dict[str, str], coloured: bool) -> None:
    environment = environment | {"GEMMA4_COMPAT_DISABLE": "all"}
    assert ("\x1b[33moff\x1b[0m" in on_a_terminal("status", "--verbose", environment=environment)) is coloured


def test_a_table_is_wrapped_by_column() -> None:
    rows = [("a-name", "some words in the middle", "text " * 12), ("b", "x", "short")]
    assert table_text(rows, width=62).split("\n") == [
        "a-name  some words in the middle  text text text text text",
        "                                  text text text text text",
        "                                  text text",
        "b       x                         short",
    ]
    narrow = table_text(rows, width=40).split("\n")
    assert narrow[0] == "a-name  some words in the middle"
    assert narrow[1].startswith("    text text")
    assert max(map(len, narrow)) <= 40


def test_an_escape_of_a_file_is_shown_on_a_terminal_with_colours() -> None:
    shown = on_a_terminal("explain", "KeyError: '\x1b]0;title'")
    assert "\x1b]0;title" not in shown
    assert "\\x1b]0;title" in shown


@pytest.mark.parametrize("arguments", [[], *([name] for name in COMMANDS)])
def test_help_has_no_words_of_the_framework(arguments: list[str]) -> None:
    text = CliRunner().invoke(cli.app, [*arguments, "--help"], terminal_width=80).stdout
    assert text.startswith("Usage: ")
    assert not re.search(r"<\w+(\[\w+\])?>|\[\[|╭|completion", text), text
    assert "..." not in text.partition("Commands:")[2]
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_there_for_who_asks(shell: str) -> None:
    environment = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    code, out, _ = command("--show-completion", shell, environment=environment)
    assert code == 0
    assert "COMPLETE" in out


@pytest.mark.parametrize("name", ["doctor", "explain"])
def test_an_id_that_nobody_knows_is_one_short_line(name: str) -> None:
    done = CliRunner().invoke(cli.app, [name, "zzzzzz"])
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert len(done.stderr) < 250


def test_what_libraries_log_at_their_import_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    def import_it(name: str) -> None:
        logging.getLogger(name).warning("a part is missing")

    mine: Callable[[str], logging.Logger] = logging.getLogger
    with terminal.without_chatter():
        import_it("bitsandbytes.backends.cpu.ops")
    assert capsys.readouterr() == ("", "")
    import_it("bitsandbytes.backends.cpu.ops")
    mine("bitsandbytes").setLevel(logging.INFO)
    try:
        with terminal.without_chatter():
            assert mine("bitsandbytes").level == logging.INFO, "what the user has set stays"
    finally:
        mine("bitsandbytes").setLevel(logging.NOTSET)


def test_progress_is_written_over_on_a_terminal_alone(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.overwrite("[1/2] x")
    assert capsys.readouterr() == ("", "")
    assert not sys.stderr.isatty()


def test_a_slow_command_says_at_once_what_it_does_on_a_terminal_only() -> None:
    arguments = ("plan", "E2B", "--vram", "8 apples")
    first, second = on_a_terminal(*arguments).splitlines()
    assert first == "gemma4-compat: planning E2B: importing torch and transformers first ..."
    assert "'8 apples' is not a size" in second
    code, out, error = command(*arguments)
    assert (code, out) == (2, "")
    assert error.strip() == second


def test_code_that_a_reader_pastes_is_not_broken() -> None:
    text = "Say `pip install torch==2.13.0 torchvision --index-url https://x` or ``import gemma4_compat`` or do not."
    for width in (20, 40, 60):
        lines = wrapped(text, width).split("\n")
        assert len(lines) > 1
        for code in ("`pip install torch==2.13.0 torchvision --index-url https://x`", "``import gemma4_compat``"):
            assert any(code in line for line in lines)
    plain = "one `two` three"
    assert paragraphs(f"{plain}\n{plain}\n\n    code  stays", 60) == f"{plain} {plain}\n\n    code  stays"
