"""States and verdicts have one vocabulary, and docs/STATES.md has all of it."""

from __future__ import annotations

import re

import pytest

import gemma4_compat
from gemma4_compat._doctor import findings
from gemma4_compat._doctor import text as doctor_text
from gemma4_compat._engine import words
from gemma4_compat._engine.patch import PatchState, PatchStatus
from gemma4_compat._needed.judge import Verdict
from tests.commands.helpers import ROOT

ROWS = re.findall(
    r"^\| ([^|`]+) \| [^|]+ \| ([^|]*)\| ([^|]*)\| ([^|]*)\|$", (ROOT / "docs/STATES.md").read_text(), re.M
)
WORDS = {word: [re.findall(r"`([^`]+)`", cell) for cell in cells] for word, *cells in ROWS}


@pytest.mark.parametrize("state", PatchState)
def test_a_state_has_its_word(state: PatchState) -> None:
    word = words.state_word(PatchStatus(id="x", state=state, reason="because"))
    assert state in WORDS[word][0]


def test_what_another_library_makes_unnecessary_is_not_needed() -> None:
    status = PatchStatus(id="x", state=PatchState.SKIPPED, reason="only needed with x<1; x is 2")
    assert words.state_word(status) == "not needed"


@pytest.mark.parametrize("verdict", Verdict)
def test_a_verdict_of_needed_has_its_word(verdict: Verdict) -> None:
    assert str(verdict) in WORDS[verdict.replace("_", " ")][1]


def test_a_verdict_of_doctor_has_its_word() -> None:
    verdicts = {value for value in vars(findings).values() if isinstance(value, str) and value in doctor_text.WORDS}
    assert verdicts == set(doctor_text.WORDS)
    for verdict, word in doctor_text.WORDS.items():
        assert verdict in WORDS[word][2]


def test_what_status_shows_is_in_the_table() -> None:
    assert {words.state_word(status) for status in gemma4_compat.status().values()} <= set(WORDS)
