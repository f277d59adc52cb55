"""The parent: what it makes of what children say, of how they end, and of the time."""

from __future__ import annotations

import json
import signal
import textwrap
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat import Gemma4CompatError
from gemma4_compat._doctor.check import run
from gemma4_compat._doctor.check.run import Check, Outcome, Settings

SAY = """
import json, os, signal, sys, time
order = json.load(sys.stdin)
say = lambda event: print(json.dumps(event), flush=True)
"""


def child(script: str, monkeypatch: pytest.MonkeyPatch, *, minutes: float = 1, limit: float = 20) -> Outcome:
    """What becomes of a child that runs ``script``."""
    monkeypatch.setattr(run, "_CHILD", ("-c", SAY + textwrap.dedent(script)))
    check = Check(Settings(folder=None, minutes=minutes), lambda _line, _begins: None)
    return check._child("a placement", {"kind": "case", "folder": None}, limit)


def test_results_and_failures_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    found = child(
        """
        say({"steps": ["load", "text", "speed"]})
        say({"step": "load"}); say({"done": "load", "found": {"peak": 3}})
        say({"step": "text"}); say({"failed": "text", "error": {"type": "ValueError"}})
        say({"skipped": "speed"}); say({"end": True})
        """,
        monkeypatch,
    )
    assert (found.steps, found.done) == (["load", "text", "speed"], {"load": {"peak": 3}})
    assert (found.failed, found.skipped) == ({"text": {"type": "ValueError"}}, ["speed"])


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="this system has no signals")
@pytest.mark.parametrize("name, more", [("SIGKILL", ", as the system does when its memory is full"), ("SIGSEGV", "")])
def test_a_process_that_is_ended(name: str, more: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "say({'step': 'load'}); say({'done': 'load', 'found': {}}); say({'step': 'text'})\n"
    found = child(f"{script}os.kill(os.getpid(), signal.{name})", monkeypatch)
    assert found.done == {"load": {}}
    assert found.failed["text"]["type"] == name
    assert found.failed["text"]["message"] == f"the process was ended by {name}{more}"


def test_a_process_that_ends_with_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    found = child("raise OSError(28, 'No space left on device')", monkeypatch)
    error = found.failed["start"]
    assert error["message"] == "the process ended with 1: OSError: [Errno 28] No space left on device"
    assert "Make room" in error["advice"]


def test_a_line_that_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    found = child("print('{\"done\": \"lo', end='', flush=True); os._exit(3)", monkeypatch)
    assert found.failed["start"]["message"].startswith("the process ended with 3")


def test_a_step_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_FEWEST", 0.0)
    found = child("say({'step': 'load'}); time.sleep(60)", monkeypatch, limit=1.5)
    assert found.failed["load"]["type"] == "Timeout"
    assert "--minutes gives more" in found.failed["load"]["message"]
    assert found.seconds < 30


def test_what_is_not_started_because_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    found = child("raise SystemExit('it ran')", monkeypatch, minutes=5, limit=-1)
    assert found.failed["start"]["message"] == "not started: the 5 minutes were over (--minutes gives more)"


def test_what_is_printed_by_libraries_is_no_event() -> None:
    """The real child: its standard output is for events only."""
    check = Check(Settings(folder=None), lambda _line, _begins: None)
    found = check._child("a placement", {"kind": "merge", "folder": "."}, 60)
    assert found.failed["merge"]["type"] == "KeyError"
    assert found.said["end"] is True


def surveyed(error: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"say({{'failed': 'survey', 'error': json.loads({json.dumps(error)!r})}}); say({{'end': True}})"
    monkeypatch.setattr(run, "_CHILD", ("-c", SAY + script))
    Check(Settings(folder=Path("model")), lambda _line, _begins: None).run()


def test_a_survey_that_refuses_is_bad_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    error = {
        "type": "Gemma4CompatError",
        "message": "does not fit",
        "refusal": True,
        "patches": [],
        "advice": None,
    }
    with pytest.raises(Gemma4CompatError, match=r"^does not fit$"):
        surveyed(error, monkeypatch)
    crash = error | {"type": "ImportError", "message": "cannot import name", "refusal": False}
    with pytest.raises(Gemma4CompatError, match="survey of machine and model crashed: ImportError: cannot import"):
        surveyed(crash, monkeypatch)


def test_an_estimate_comes_from_steps_that_have_run() -> None:
    check = Check(Settings(folder=None, minutes=5), lambda _line, _begins: None)
    outcome = Outcome("a placement", {})
    assert check._estimate(outcome) == ""
    check._planned = ["start", "load", "text", "speed"]
    check._left = ["another"]
    check._took = {"start": [6.0], "load": [4.0], "text": [2.0]}
    outcome.steps, outcome.done = ["load", "text", "speed"], {"load": {}}
    # text 2 and speed 4 (the mean) here, and all of them in the other.
    assert check._estimate(outcome) == "; about 22 s left"


def test_how_long_prompts_are_that_are_timed() -> None:
    def contexts(context: int, *, quick: bool) -> list[int]:
        return Check(Settings(folder=None, quick=quick), lambda _line, _begins: None)._contexts(context)

    assert contexts(4096, quick=False) == [64, 1024, 3968]
    assert contexts(4096, quick=True) == [64]
    assert contexts(128, quick=False) == [32, 64]


def test_only_what_was_planned_for_a_budget_is_held_to_it() -> None:
    check = Check(Settings(folder=None, vram="2GiB"), lambda _line, _begins: None)
    assert check._limit({"prefill": 100, "decode": 90}, 100) == 100 + (1 << 29)
    assert check._limit({"prefill": 101, "decode": 90}, 100) is None
    assert check._limit(None, 100) is check._limit({"prefill": 1}, None) is None
    assert Check(Settings(folder=None), lambda _line, _begins: None)._limit({"prefill": 1}, 100) is None
