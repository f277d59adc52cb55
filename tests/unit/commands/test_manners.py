"""How commands behave on a terminal, and in their help: columns, colours, completion, no words of the framework."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.shim import commands
from gemma4_compat import _startup, cli
from gemma4_compat._engine.io import terminal
from gemma4_compat._engine.io.text import paragraphs, table_text, wrapped
from tests.unit.commands.helpers import command, finished, started

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
    "arguments",
    [["status", "-v"], ["status"], ["list"], ["list", "-v"], ["needed", "-v"], ["needed"], ["explain", "KeyError: 3"]],
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


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "MODEL", "--vram", "8GiB"],
        ["plan-training", "MODEL", "--vram", "8GiB"],
        ["check", "MODEL"],
        ["check", "MODEL", "--download"],
        ["serve", "MODEL"],
        ["chat", "MODEL", "--vram", "8GiB"],
        ["scan", "ADAPTER", "MODEL"],
        ["export", "ADAPTER", "OUT", "--for", "vllm", "--base", "MODEL"],
        ["merge", "MODEL", "ADAPTER", "OUT"],
        ["repair", "OUT", "OUT2", "--from", "MODEL"],
    ],
    ids=lambda arguments: " ".join(arguments[:1] + [word for word in arguments if word == "--download"]),
)
def test_a_model_that_can_only_be_a_folder_has_to_be_there(
    workspace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    """Also where its name ends as a variant's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    known = {"MODEL": "./models/gemma-4-E2B-it", "ADAPTER": str(workspace.adapter("language")), "OUT2": "out"}
    known["OUT"] = "there" if arguments[0] == "repair" else "new"
    done = CliRunner().invoke(cli.app, [known.get(word, word) for word in arguments])
    assert done.exit_code == 2, done.output
    said = done.stderr.strip().splitlines()[-1]
    assert said.startswith("gemma4-compat: the folder './models/gemma-4-E2B-it' does not exist; give that of ")
    assert not (tmp_path / "new").exists()


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


class Screen(io.StringIO):
    """A terminal of 80 columns that remembers when something was written, and what its last line shows."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.times.append(time.monotonic())
        return super().write(text)

    @property
    def lines(self) -> list[str]:
        found = []
        for line in self.getvalue().split("\n"):
            cells: list[str] = []
            for part in line.split("\r"):
                cells[: len(part)] = part
            found.append("".join(cells).rstrip())
        return found


@contextlib.contextmanager
def on_a_screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    """Inside, standard error is one; pytest replaces it between a fixture and its test."""
    found = Screen()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", found)
        patched.setattr(terminal, "_TICK", 0.05)
        patched.setenv("COLUMNS", "80")
        yield found
        terminal.overwrite("")


def test_what_takes_long_says_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_a_screen(monkeypatch) as screen:
        with terminal.guarded():
            terminal.overwrite("at work")
            assert screen.lines == ["at work"]
            time.sleep(0.5)
            assert re.fullmatch(r"at work \(\d s\)", "\n".join(screen.lines))  # on a busy machine not 0
            terminal.overwrite("y" * 200)
            time.sleep(0.2)
            assert re.fullmatch(r"y{73} \(\d s\)", "\n".join(screen.lines)), "cut to the width, the seconds are whole"
        assert screen.lines == [""]
        written = len(screen.times)
        time.sleep(0.2)
        assert len(screen.times) == written, "nothing is written once it has ended"
        assert max(after - before for before, after in pairwise(screen.times)) < 3


def test_what_is_written_takes_the_place_of_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_a_screen(monkeypatch) as screen:
        with terminal.guarded():
            terminal.overwrite("at work")
            terminal.write("found", error=True)
            print("a library's line", file=sys.stderr)
            assert screen.lines == ["found", "a library's line", ""]
            time.sleep(0.3)
            *others, last = screen.lines
            assert others == ["found", "a library's line"]
            assert re.fullmatch(r"at work \(\d s\)", last)
        assert screen.lines == ["found", "a library's line", ""]


def test_control_characters_in_progress_are_shown_as_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_a_screen(monkeypatch) as screen:
        terminal.overwrite("a\x1b[31m\nb")
        assert screen.lines == ["a\\x1b[31m\\nb"]


@pytest.mark.full
def test_a_terminal_is_never_silent_for_long() -> None:
    """As a user sees it: the first byte within a second of CPU time, then something new within three."""
    found = commands.measured(["plan", "E2B", "--vram", "8GiB"], "terminal", chats=False, serves=False, limit=300)
    assert found["exit"] == 0
    assert found["longest_silence_s"] < 3 * max(1, found["wall_s"] / found["cpu_s"]), "this machine may be shared"


WRONG = [name for name in commands.COMMANDS if name.startswith("wrong")]


@pytest.mark.full
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused_before_torch_is_imported(tmp_path: Path, name: str) -> None:
    words = commands.words(commands.COMMANDS[name], tmp_path / "out")
    code = (
        "import sys\nfrom gemma4_compat.cli import main\n"
        "try:\n    main()\nfinally:\n    print(sorted({'torch', 'transformers'} & sys.modules.keys()))"
    )
    done, out, error = finished(started("-c", code, *words))
    assert (done, out) == (2, "[]\n"), error
    assert "gemma4-compat: " in error


def test_a_slow_command_says_at_once_what_it_does_on_a_terminal_only() -> None:
    arguments = ("plan", "E2B", "--vram", "8 apples")
    first, second = (line.rpartition("\r")[2] for line in on_a_terminal(*arguments).strip().split("\n"))
    assert first == "gemma4-compat: planning E2B: importing torch and transformers first ..."
    assert "'8 apples' is not a size" in second
    code, out, error = command(*arguments)
    assert (code, out) == (2, "")
    assert error.strip() == second


@pytest.mark.parametrize(
    "started_as, expected",
    [
        ("/usr/bin/gemma4-compat", True),
        (str(Path(cli.__file__).parents[1] / "__main__.py"), True),  # python -m gemma4_compat
        ("/usr/lib/python3/pytest/__main__.py", False),
        ("train.py", False),
        ("", False),
    ],
)
def test_a_process_of_the_command_knows_it(monkeypatch: pytest.MonkeyPatch, started_as: str, expected: bool) -> None:
    monkeypatch.setattr(sys, "argv", [started_as])
    assert _startup.is_command_line() is expected


def test_the_heading_of_a_report_that_is_pasted_stays_a_line() -> None:
    lines = on_a_terminal("reproduce", "peft-keep-dispatch", "--report").splitlines()
    assert lines[0].startswith("### ")
    assert len(lines[0]) > 80
    assert lines[1] == ""
    assert max(len(line) for line in lines[2:] if "`" not in line) <= 80


def test_code_that_a_reader_pastes_is_not_broken() -> None:
    text = "Say `pip install torch==2.13.0 torchvision --index-url https://x` or ``import gemma4_compat`` or do not."
    for width in (20, 40, 60):
        lines = wrapped(text, width).split("\n")
        assert len(lines) > 1
        for code in ("`pip install torch==2.13.0 torchvision --index-url https://x`", "``import gemma4_compat``"):
            assert any(code in line for line in lines)
    plain = "one `two` three"
    assert paragraphs(f"{plain}\n{plain}\n\n    code  stays", 60) == f"{plain} {plain}\n\n    code  stays"
