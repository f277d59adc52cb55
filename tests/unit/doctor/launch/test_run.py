"""``gemma4-compat run``: the program is what it is without, but for the shim in it and in its children."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gemma4_compat import cli
from gemma4_compat._doctor.launch import environment, program
from tests.unit.commands.helpers import command, finished, started
from tests.unit.doctor.launch.conftest import REPORT, RUN

Script = Callable[..., str]
Run = Callable[..., tuple[int, str, str]]

full = pytest.mark.full
OTHERS = (signal.SIGTERM, signal.SIGINT, signal.SIGABRT)
SELF = """
import json, os, sys
names = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
print(json.dumps([sys.argv, sys.path, list(sys.flags), sys.orig_argv[1:], names, os.getcwd(), sys.stdin.read(),
                  sorted(sys.modules), [type(finder).__name__ for finder in sys.meta_path], __name__]))
print("to standard error", file=sys.stderr)
sys.exit(7)
"""


def both(*arguments: str, **options: Any) -> list[tuple[int, str, str]]:
    """Of this Python with ``arguments``, and of ``run`` with them."""
    return [finished(started(*before, *arguments, **options)) for before in ((), RUN)]


def test_a_script_sees_what_it_sees_without(script: Script, tmp_path: Path) -> None:
    (tmp_path / "input").write_text("two\nlines", encoding="utf-8")
    words = [script(SELF), "a b", "--", "-h", "--json", "", "ä'\"$x", "*"]
    seen = []
    for before in ((), RUN):
        with (tmp_path / "input").open(encoding="utf-8") as stdin:
            seen.append(finished(started(*before, *words, folder=tmp_path, stdin=stdin)))
    assert seen[0][::2] == seen[1][::2] == (7, "to standard error\n")
    without, within = (json.loads(out) for _, out, _ in seen)
    modules, finders = within.pop(7), within.pop(7)
    assert set(modules) - set(without.pop(7)) == {"_gemma4_compat_hook"}
    assert finders == ["Finder", *without.pop(7)]
    assert within == without
    assert within[6] == "two\nlines"


@pytest.mark.parametrize(
    "arguments",
    [
        ["-c", "import sys; print(sys.argv, sys.path[0]); sys.exit('a reason')", "x", "-h"],
        ["-u", "-X", "utf8", "-m", "json.tool", "--help"],
        pytest.param(["-u", "-X", "dev", "-c", "import sys; print(sys.flags, sys.argv)"], marks=full),
        pytest.param(["no-such-script.py"], marks=full),
        pytest.param(["-c", "raise ValueError('ours')"], marks=full),
        pytest.param(["--version"], marks=full),
        pytest.param(["-m", "no_such_module"], marks=full),
    ],
)
def test_options_of_python_are_those_of_this_python(arguments: list[str]) -> None:
    without, within = both(*arguments)
    assert within == without


@full
def test_options_before_the_module_are_for_the_program_too() -> None:
    code = "import sys; print(sys.flags.dev_mode, sys.flags.optimize, sys.orig_argv[1:4])"
    done = finished(started("-X", "dev", "-Om", "gemma4_compat", "run", "-c", code))
    assert done == (0, "True 1 ['-X', 'dev', '-O']\n", "")


@pytest.mark.parametrize(
    "typed, arguments, expected",
    [
        (["python", "-u", "-m", "gemma4_compat", "run", "x"], ["__main__.py", "run", "x"], ["-u"]),
        (["python", "-um", "gemma4_compat", "run"], ["__main__.py", "run"], ["-u"]),
        (["python", "-mgemma4_compat", "run"], ["__main__.py", "run"], []),
        (["python", "-X", "dev", "-umgemma4_compat", "run"], ["__main__.py", "run"], ["-X", "dev", "-u"]),
        (["python", "-sE", "/bin/gemma4-compat", "run"], ["/bin/gemma4-compat", "run"], []),
        (["python", "gemma4-compat", "run", "-u"], ["gemma4-compat", "run", "-u"], []),
    ],
)
def test_which_options_were_before_the_module(typed: list[str], arguments: list[str], expected: list[str]) -> None:
    assert program._own_options(typed, arguments) == expected


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGPIPE, *(pytest.param(number, marks=full) for number in OTHERS)]
)
def test_a_program_dies_of_the_signal_that_kills_it(number: signal.Signals, script: Script) -> None:
    """A shell, too: Python ignores SIGPIPE, which programs must not inherit."""
    words = script(f"import os, signal\nsignal.signal({number}, signal.SIG_DFL) if {number} != 9 else 0\n"
                   f"os.kill(os.getpid(), {number})\n")  # fmt: skip
    assert finished(started(*RUN, words))[0] == -number
    assert finished(started(*RUN, "sh", "-c", f"kill -{number} $$; exit 3"))[0] == -number


@pytest.mark.parametrize("number, code", [(signal.SIGINT, -2), pytest.param(signal.SIGTERM, 5, marks=full)])
def test_a_signal_reaches_the_program_itself(number: signal.Signals, code: int, script: Script) -> None:
    """It has the process that ``run`` was started as."""
    text = "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
    process = started(*RUN, script(text + "print(os.getpid(), flush=True)\ntime.sleep(60)"))
    assert process.stdout is not None
    assert int(process.stdout.readline()) == process.pid
    process.send_signal(number)
    assert finished(process)[0] == code


def test_a_terminal_stays_the_programs_terminal(script: Script) -> None:
    """Its own, with the line that was typed there before."""
    main, terminal = pty.openpty()
    os.write(main, b"typed\n")
    text = "import os, sys\nprint(input(), [os.isatty(n) for n in range(3)], os.ttyname(0))"
    streams = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    process = started(*RUN, script(text), **streams)
    assert process.wait(timeout=240) == 0
    assert f"typed [True, True, True] {os.ttyname(terminal)}" in os.read(main, 4096).decode()
    os.close(main)
    os.close(terminal)


@full
def test_open_files_are_inherited(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w", encoding="utf-8") as file:
        code = f"import os; os.write({file.fileno()}, b'seen')"
        assert finished(started(*RUN, "-c", code, pass_fds=[file.fileno()]))[0] == 0
    assert (tmp_path / "file").read_text(encoding="utf-8") == "seen"


@pytest.mark.parametrize(
    "words, code, said",
    [
        (["no-such-program"], 127, "there is no program 'no-such-program' on PATH"),
        (["./no/such"], 127, "there is no program './no/such' on PATH"),
        (["/"], 126, "'/' cannot be executed"),
        (["python", "-I", "x.py"], 2, "'python' with the option -I of Python would not see the shim"),
        (["-uE", "x.py"], 2, "the option -E of Python"),
        (["-W", "error", "-S", "x.py"], 2, "the option -S of Python would not see the shim; leave it out\n"),
        ([], 2, "Missing argument"),
    ],
)
def test_what_cannot_be_started(words: list[str], code: int, said: str) -> None:
    done = CliRunner().invoke(cli.app, ["run", *words])
    assert (done.exit_code, done.stdout) == (code, "")
    assert said in done.stderr


@pytest.mark.parametrize(
    "words", [["-c", "0", "-I"], ["-m", "this", "-S"], ["-XE", "-c", "0"], ["-W", "-I", "-c", "0"]]
)
def test_options_of_the_program_are_not_pythons(words: list[str]) -> None:
    assert program._deaf_option(words) is None


def test_programs_that_are_not_python(tmp_path: Path, script: Script) -> None:
    """A script without ``#!`` is the shell's, one with it says itself what it is, and one for -E is refused."""
    plain, mine, deaf = tmp_path / "plain", tmp_path / "mine", tmp_path / "deaf"
    plain.write_text("echo $0 $1; exit 4\n", encoding="utf-8")
    mine.write_text(f"#!{sys.executable}\nimport sys; print(sys.argv)\n", encoding="utf-8")
    deaf.write_text(f"#!{sys.executable} -E\n", encoding="utf-8")
    for file in (plain, mine, deaf):
        file.chmod(0o755)
    assert command("run", "--", str(plain), "x") == (4, f"{plain} x\n", "")
    assert command("run", "mine", environment={"PATH": str(tmp_path)}) == (0, f"['{mine}']\n", "")
    assert command("run", str(deaf))[0] == 2


def test_programs_beside_this_python_are_found_without_activation() -> None:
    name = Path(sys.executable).name
    done = command("run", name, "-c", "import sys; print(sys.executable)", environment={"PATH": "/nowhere"})
    assert done == (0, f"{sys.executable}\n", "")


@full
def test_a_run_inside_a_run_is_one() -> None:
    code = "import os; print(os.environ['PYTHONPATH'].count('hook'))"
    assert finished(started(*RUN, sys.executable, *RUN, "-c", code)) == (0, "1\n", "")


def test_a_shadowing_folder_is_not_searched(tmp_path: Path) -> None:
    """``python -m gemma4_compat`` imports nothing from where it is started, under ``run`` as well."""
    (tmp_path / "json.py").write_text("raise SystemExit('evil')", encoding="utf-8")
    code, out, _ = command("run", "-m", "gemma4_compat", "status", "--json", folder=tmp_path)
    assert (code, json.loads(out)["startup"]["file"]) == (0, None)


@pytest.mark.parametrize(
    "way", ["-m", "program", *(pytest.param(way, marks=full) for way in ("script", "-c", "archive"))]
)
def test_the_shim_is_in_the_program(way: str, with_run: Run, script: Script, tmp_path: Path) -> None:
    script(REPORT, "__main__.py")
    words = {
        "script": [script(REPORT)],
        "-m": ["-m", "program"],
        "-c": ["-c", REPORT],
        "archive": [str(tmp_path)],
        "program": ["sh", "-c", f"'{sys.executable}' program.py"],
    }[way]
    script(REPORT)
    assert with_run(*words) == (0, "armed\n", "")


@pytest.mark.parametrize("method", ["spawn", "forkserver", pytest.param("fork", marks=full)])
def test_the_shim_is_in_processes_of_multiprocessing(method: str, with_run: Run, script: Script) -> None:
    text = f"""
import multiprocessing
def report():
    {REPORT.strip().replace(chr(10), chr(10) + "    ")}
if __name__ == "__main__":
    process = multiprocessing.get_context({method!r}).Process(target=report)
    process.start(); process.join()
"""
    assert with_run(script(text)) == (0, "armed\n", "")


def test_the_shim_is_in_a_child_with_a_search_path_before_ours(with_run: Run, script: Script) -> None:
    text = f"""
import os, subprocess, sys
os.environ["PYTHONPATH"] = "src" + os.pathsep + os.environ["PYTHONPATH"]
sys.exit(subprocess.run([sys.executable, "-c", {REPORT!r}]).returncode)
"""
    assert with_run(script(text)) == (0, "armed\n", "")


def test_windows_waits_for_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot replace a process."""
    asked = []

    def run(words: list[str], env: dict[str, str], check: bool) -> Any:
        asked.append((words, env["PYTHONPATH"]))
        return subprocess.CompletedProcess(words, 3)

    monkeypatch.setattr(program, "_WINDOWS", True)
    monkeypatch.setattr(program.subprocess, "run", run)
    assert program.execute(["sh", "x"]) == 3
    (words, path) = asked[0]
    assert words[1:] == ["x"]
    assert path.split(os.pathsep)[0] == str(environment.HOOK)


def test_a_script_in_the_place_of_a_command_is_told_how() -> None:
    done = CliRunner().invoke(cli.app, ["train.py", "--x"])
    assert done.exit_code == 2
    assert "'train.py' is not a command; to run it: gemma4-compat run train.py" in " ".join(
        done.stderr.replace("│", "").split()
    )
