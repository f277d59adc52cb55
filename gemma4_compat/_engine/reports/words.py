"""The verdicts on a patch, and the words in which people read them; docs/STATES.md explains each."""

from __future__ import annotations

import enum
from typing import NamedTuple

from gemma4_compat._engine.io.text import Cell, Tone
from gemma4_compat._engine.patch import PatchState, PatchStatus, Reason


class _Look(NamedTuple):
    word: str
    tone: Tone
    good: bool


class Verdict(str, enum.Enum):
    """What became of a patch, and of the defect. The values are those of ``doctor --json`` and docs/matrix.

    ``status``, which reproduces no defect, gives the first six and NOT_NEEDED.
    """

    REGISTERED = "registered"
    PENDING = "pending"
    APPLIED = "applied"
    OFF = "off"
    FAILED = "PATCH FAILED"
    REVERTED = "reverted"
    REPAIRED = "repaired"
    NOT_NEEDED = "not affected"
    NOT_APPLICABLE = "not applicable"
    FAILED_NOT_SEEN = "patch off, defect not seen"
    REMAINS = "DEFECT REMAINS"
    OFF_REMAINS = "skipped, DEFECT REMAINS"
    FAILED_REMAINS = "PATCH OFF, DEFECT REMAINS"
    BROKEN = "BROKEN BY THE PATCH"
    NOT_MEASURED = "NOT MEASURED"

    __str__ = str.__str__

    @property
    def word(self) -> str:
        """What people read: "not needed"."""
        return _LOOKS[self].word

    @property
    def good(self) -> bool:
        """Whether no defect remains and nothing failed."""
        return _LOOKS[self].good

    @property
    def cell(self) -> Cell:
        """The word as the cell of a table, in its colour."""
        return Cell(*_LOOKS[self][:2])


_LOOKS = {
    Verdict.REGISTERED: _Look("registered", Tone.DIM, good=True),
    Verdict.PENDING: _Look("pending", Tone.PLAIN, good=True),
    Verdict.APPLIED: _Look("applied", Tone.GOOD, good=True),
    Verdict.OFF: _Look("off", Tone.WARNING, good=False),
    Verdict.FAILED: _Look("failed", Tone.BAD, good=False),
    Verdict.REVERTED: _Look("reverted", Tone.WARNING, good=False),
    Verdict.NOT_NEEDED: _Look("not needed", Tone.DIM, good=True),
    Verdict.NOT_APPLICABLE: _Look("not applicable", Tone.DIM, good=True),
    Verdict.REPAIRED: _Look("repaired", Tone.GOOD, good=True),
    Verdict.FAILED_NOT_SEEN: _Look("failed, defect not seen", Tone.WARNING, good=True),
    Verdict.REMAINS: _Look("defect remains", Tone.BAD, good=False),
    Verdict.OFF_REMAINS: _Look("off, defect remains", Tone.BAD, good=False),
    Verdict.FAILED_REMAINS: _Look("failed, defect remains", Tone.BAD, good=False),
    Verdict.BROKEN: _Look("broken by the patch", Tone.BAD, good=False),
    Verdict.NOT_MEASURED: _Look("not measured", Tone.WARNING, good=False),
}


def of(status: PatchStatus) -> Verdict:
    """The verdict that a state is. A skipped patch is off, or not needed with the installed release of a library."""
    if status.reason_code is Reason.ONLY_WITH:
        return Verdict.NOT_NEEDED
    return _OF_STATES[status.state]


_OF_STATES = {
    PatchState.REGISTERED: Verdict.REGISTERED,
    PatchState.SKIPPED: Verdict.OFF,
    PatchState.NOT_NEEDED: Verdict.NOT_NEEDED,
    PatchState.PENDING: Verdict.PENDING,
    PatchState.APPLIED: Verdict.APPLIED,
    PatchState.FAILED: Verdict.FAILED,
    PatchState.REVERTED: Verdict.REVERTED,
}
