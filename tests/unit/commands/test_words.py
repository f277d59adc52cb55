"""States, reasons and verdicts have one vocabulary each, and docs/STATES.md has all of it."""

from __future__ import annotations

import re

import pytest

import gemma4_compat
from gemma4_compat import Kind, PatchState, PatchStatus, Reason, Severity, Verdict
from gemma4_compat._engine.reports import words
from gemma4_compat._needed import judge
from tests.unit.commands.helpers import ROOT

PAGE = (ROOT / "docs" / "STATES.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([^|`]+) \| [^|]+ \| ([^|]*)\| ([^|]*)\| ([^|]*)\|$", PAGE, re.M)
WORDS = {word: [re.findall(r"`([^`]+)`", cell) for cell in cells] for word, *cells in ROWS}
#: Code -> state, of the table of reasons.
CODES = dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|", PAGE, re.M))


def status(state: PatchState, code: Reason) -> PatchStatus:
    return PatchStatus(id="x", state=state, reason_code=code, reason="because")


@pytest.mark.parametrize("state", PatchState)
def test_a_state_has_its_word(state: PatchState) -> None:
    assert state in WORDS[words.of(status(state, Reason.ERROR)).word][0]


def test_what_another_library_makes_unnecessary_is_not_needed() -> None:
    assert words.of(status(PatchState.SKIPPED, Reason.ONLY_WITH)) is Verdict.NOT_NEEDED
    assert words.of(status(PatchState.SKIPPED, Reason.TOO_OLD)) is Verdict.OFF
    assert {"skipped", "only_with"} <= {*WORDS["not needed"][0]}


@pytest.mark.parametrize("verdict", judge.Verdict)
def test_a_verdict_of_needed_has_its_word(verdict: judge.Verdict) -> None:
    assert str(verdict) in WORDS[verdict.replace("_", " ")][1]


def test_each_verdict_has_a_word_of_its_own_and_a_line() -> None:
    assert len({verdict.word for verdict in Verdict}) == len(Verdict)
    assert {verdict.word for verdict in Verdict} <= {*WORDS}
    assert {value for cells in [*WORDS.values()][1:] for value in cells[2]} <= {*Verdict}, "doctor says nothing else"


def test_each_reason_has_a_line_with_its_state() -> None:
    assert [*CODES] == [*Reason]
    assert {*CODES.values()} == {*PatchState}


def test_each_kind_has_a_line_and_each_severity_is_named() -> None:
    kinds = PAGE.partition("## Kinds of patches")[2]
    assert re.findall(r"^\| `(\w+)` \|", kinds, re.M)[1:] == [*Kind]
    assert all(f"`{severity}`" in kinds for severity in Severity)


def test_what_status_shows_is_in_the_tables() -> None:
    for found in gemma4_compat.status().values():
        assert words.of(found).word in WORDS
        assert CODES[found.reason_code] == found.state
