"""The words for states and verdicts in everything that people read; docs/STATES.md explains them.

JSON has the values of :class:`~gemma4_compat._engine.patch.PatchState` and of the verdicts, which are stable.
"""

from __future__ import annotations

from gemma4_compat._engine.gate import ONLY_WITH
from gemma4_compat._engine.patch import PatchState, PatchStatus

NOT_NEEDED = "not needed"
OFF = "off"


def state_word(status: PatchStatus) -> str:
    """The word for the state of a patch; what is skipped is off, or not needed beside that release of a library."""
    if status.state is PatchState.SKIPPED:
        return NOT_NEEDED if status.reason.startswith(ONLY_WITH) else OFF
    return status.state.replace("_", " ")
