"""Patches and statuses as text and as JSON-able data."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any

from gemma4_compat._engine.patch import Patch, PatchStatus
from gemma4_compat._engine.text import table_text

if TYPE_CHECKING:
    from gemma4_compat._needed.judge import Answer


def status_data(status: PatchStatus) -> dict[str, Any]:
    """One status as plain data."""
    return {
        "id": status.id,
        "state": str(status.state),
        "reason": status.reason,
        "versions": dict(status.versions),
        "late": status.late,
        "overridden": list(status.overridden),
    }


def patch_data(patch: Patch) -> dict[str, Any]:
    """One patch's metadata as plain data, its file's documentation included."""
    return {
        "id": patch.id,
        "summary": patch.summary,
        "symptom": patch.symptom,
        "severity": str(patch.severity),
        "failure_points": list(patch.failure_points),
        "distribution": patch.distribution,
        "affected": patch.affected,
        "measured": patch.measured,
        "requires": list(patch.requires),
        "targets": [str(target) for target in patch.targets],
        "bug": list(patch.bug),
        "applied_upstream": patch.applied_upstream,
        "fixed": patch.fixed,
        "retire_when": patch.retire_when,
        "opt_in": patch.opt_in,
        "documentation": documentation(patch),
    }


def documentation(patch: Patch) -> str:
    """The docstring of the patch's file: what breaks, why, what changes, when it goes."""
    return inspect.cleandoc(sys.modules[patch.reproduce.__module__].__doc__ or "")


def status_text(statuses: dict[str, PatchStatus]) -> str:
    """One line a patch: id, state, reason."""
    return table_text([(status.id, f"{status.state!s:<10}", status.reason) for status in statuses.values()])


def patches_text(patches: tuple[Patch, ...]) -> str:
    """One line a patch: id, rows of the map, affected releases, summary."""
    rows = [
        (patch.id, "+".join(patch.failure_points), f"{patch.distribution} {patch.affected}", patch.summary)
        for patch in patches
    ]
    return table_text(rows)


def explanation_text(patch: Patch, status: PatchStatus) -> str:
    """Everything known about one patch, for a reader."""
    rows = [
        ("affected", f"{patch.distribution} {patch.affected}" + "".join(f", {text}" for text in patch.requires)),
        ("measured up to", patch.measured),
        ("fixed in", patch.fixed or "no release so far"),
        ("upstream", "\n".join(filter(None, (*patch.bug, patch.applied_upstream))) or "not reported"),
        ("replaces", "\n".join(str(target) for target in patch.targets)),
        ("goes when", patch.retire_when),
        ("here", f"{status.state}: {status.reason}"),
        ("opt out", f"GEMMA4_COMPAT_DISABLE={patch.id}"),
    ]
    # A value of several lines is several rows, the first with the name.
    fields = [(name * (index == 0), line) for name, value in rows for index, line in enumerate(value.split("\n"))]
    heading = f"{patch.id} ({'+'.join(patch.failure_points)})\n{patch.summary}"
    return f"{heading}\n\n{documentation(patch)}\n\n{table_text(fields)}"


def needed_data(answer: Answer) -> dict[str, Any]:
    """What a stack needs, as plain data."""
    return {
        "source": answer.source,
        "distributions": {
            stand.distribution: {
                "text": str(stand),
                "specifiers": list(stand.ranges),
                "certain": stand.named and not stand.untold,
                "origin": stand.origin or None,
            }
            for stand in answer.stands
        },
        "notes": list(answer.notes),
        "patches": [
            {
                "id": need.patch.id,
                "verdict": str(need.verdict),
                "because": need.because,
                "unnecessary_with": list(need.unnecessary_with),
                "fixed": need.patch.fixed,
                "measured": need.patch.measured,
                "unmeasured": need.unmeasured,
                "opt_in": need.patch.opt_in,
            }
            for need in answer.needs
        ],
        "droppable": answer.droppable,
    }


def needed_text(answer: Answer) -> str:
    """What a stack needs: what is known about it, a line a patch with the needed ones first, and the sum."""
    rows = [("patch", "verdict", "unnecessary with", "because")]
    for verdict in reversed(type(answer.needs[0].verdict)):
        for need in answer.needs:
            if need.verdict is verdict:
                shown = (
                    verdict.replace("_", " ") + ("*" if need.unmeasured else "") + (" (opt-in)" * need.patch.opt_in)
                )
                way = "" if verdict == "not_needed" else " or ".join(need.unnecessary_with) or "no release so far"
                rows.append((need.patch.id, shown, way, need.because))
    head = [f"{answer.source}: {', '.join(map(str, answer.stands))}", *(f"note: {note}" for note in answer.notes)]
    return "\n".join(
        [*head, "", table_text(rows, header=True), "", *_unmeasured(answer), *_open(answer), _sum(answer)]
    )


def _unmeasured(answer: Answer) -> list[str]:
    newest = dict.fromkeys(
        f"{need.patch.distribution} {need.patch.measured}" for need in answer.needs if need.unmeasured
    )
    if not newest:
        return []
    return [f"* newer than {', '.join(newest)} is an unmeasured release; there it applies only to unchanged code."]


def _open(answer: Answer) -> list[str]:
    if not any(need.verdict == "depends" for need in answer.needs):
        return []
    return [
        "depends: what is not named may be any release, or absent; a lock file tells, or this command without a file "
        "where everything is installed."
    ]


def _sum(answer: Answer) -> str:
    counts: dict[str, int] = {}
    for need in answer.needs:
        counts[need.verdict] = counts.get(need.verdict, 0) + 1
    said = {
        "needed": "needed",
        "needed_by_some": "needed by some of these releases",
        "depends": "depend on what is not said",
        "unsupported": "cannot be judged for releases this old",
        "not_needed": "not needed",
    }
    total = ", ".join(f"{counts[verdict]} {text}" for verdict, text in said.items() if verdict in counts)
    asked = [need.patch.id for need in answer.needs if need.patch.opt_in and need.verdict != "not_needed"]
    if answer.droppable:
        unless = f", unless you enable {', '.join(asked)}" if asked else ""
        return f"{len(answer.needs)} patches: {total}. gemma4_compat can be dropped{unless}."
    return f"{len(answer.needs)} patches: {total}."
