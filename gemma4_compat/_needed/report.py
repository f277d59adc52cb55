"""An assessment as text and as JSON-able data."""

from __future__ import annotations

from typing import Any

from gemma4_compat._engine.io.text import table_text, wrapped
from gemma4_compat._errors import printable
from gemma4_compat._needed.judge import Assessment, Verdict


def assessment_data(assessment: Assessment) -> dict[str, Any]:
    """What a stack needs, as plain data."""
    return {
        "source": assessment.source,
        "distributions": {
            stated.distribution: {
                "text": str(stated),
                "specifiers": list(stated.ranges),
                "certain": stated.named and not stated.installed_from,
                "origin": stated.origin or None,
            }
            for stated in assessment.distributions
        },
        "notes": list(assessment.notes),
        "patches": [
            {
                "id": need.patch.id,
                "verdict": str(need.verdict),
                "because": need.because,
                "unnecessary_with": list(need.unnecessary_with),
                "fixed": need.patch.fixed,
                "measured": need.patch.measured,
                "unmeasured": need.unmeasured,
            }
            for need in assessment.needs
        ],
        "droppable": assessment.droppable,
    }


def assessment_text(assessment: Assessment, width: int | None = None) -> str:
    """What a stack needs: what is known about it, a line for each patch with the needed ones first, and the sum."""
    rows = [("patch", "verdict", "unnecessary with", "because")]
    for verdict in reversed(Verdict):
        for need in assessment.needs:
            if need.verdict is verdict:
                shown = verdict.word + "*" * need.unmeasured
                ways = " or ".join(need.unnecessary_with) or "no release so far"
                way = "" if verdict is Verdict.NOT_NEEDED else ways
                rows.append((need.patch.id, shown, way, need.because))
    notes = [f"note: {printable(note)}" for note in assessment.notes]
    foot = [*_unmeasured(assessment), *_undecided(assessment), assessment.summary]
    table = table_text(rows, header=True, width=width)
    parts = [wrapped(assessment.head, width), *(wrapped(note, width) for note in notes), "", table, ""]
    return "\n".join([*parts, *(wrapped(line, width) for line in foot)])


def _unmeasured(assessment: Assessment) -> list[str]:
    newest = dict.fromkeys(
        f"{need.patch.distribution} {need.patch.measured}" for need in assessment.needs if need.unmeasured
    )
    if not newest:
        return []
    return [f"* newer than {', '.join(newest)} is an unmeasured release; there it applies only to unchanged code."]


def _undecided(assessment: Assessment) -> list[str]:
    if not any(need.verdict is Verdict.DEPENDS for need in assessment.needs):
        return []
    return [
        "depends: what is not named may be any release, or absent; a lock file tells, or this command without a file "
        "where everything is installed."
    ]
