"""Patches and statuses as text and as JSON-able data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gemma4_compat._engine.io import address
from gemma4_compat._engine.io.text import counts_text, paragraphs, table_text, wrapped
from gemma4_compat._engine.patch import Patch, PatchState, PatchStatus
from gemma4_compat._engine.reports import words


def status_data(status: PatchStatus) -> dict[str, Any]:
    """One status as plain data."""
    return {
        "id": status.id,
        "state": str(status.state),
        "reason_code": str(status.reason_code),
        "reason": status.reason,
        "versions": dict(status.versions),
        "late": status.late,
        "overridden": list(status.overridden),
        "unmet": list(status.unmet),
        "unreached": status.unreached or 0,  # in the process of a command nothing is applied
    }


def patch_data(patch: Patch) -> dict[str, Any]:
    """One patch's metadata as plain data, including its file's documentation."""
    return {
        "id": patch.id,
        "area": patch.area,
        "summary": patch.summary,
        "symptom": patch.symptom,
        "kind": str(patch.kind),
        "severity": str(patch.severity),
        "failure_points": list(patch.failure_points),
        "distribution": patch.distribution,
        "affected": patch.affected,
        "acts_on": str(patch.acts_on),
        "measured": patch.measured,
        "requires": list(patch.requires),
        "targets": [str(target) for target in patch.targets],
        "bug": list(patch.bug),
        "applied_upstream": patch.applied_upstream,
        "fixed": patch.fixed,
        "retire_when": patch.retire_when,
        "needs": list(patch.needs),
        "documentation": patch.documentation,
    }


def status_text(statuses: dict[str, PatchStatus], width: int | None = None, *, colour: bool = False) -> str:
    """One line a patch: id, state, reason."""
    rows = [(status.id, words.of(status).cell, status.reason) for status in statuses.values()]
    return table_text(rows, width=width, colour=colour)


def summary_text(statuses: Mapping[str, PatchStatus]) -> str:
    """How many patches are in which state, and in what process that is, in a sentence."""
    return (
        f"What a program of this environment would get: {_counts(statuses)} "
        "Inside the program, gemma4_compat.status() says what it got."
    )


def overview_text(statuses: Mapping[str, PatchStatus], areas: Mapping[str, str], head: str, width: int | None) -> str:
    """A screen: ``head``, how many patches of each area are in which state, and those that need attention."""
    verdicts = {status.id: words.of(status) for status in statuses.values()}
    fine = {*(verdict for verdict in words.Verdict if verdict.good), words.Verdict.REVERTED}  # the user asked for it
    bad = [status for status in statuses.values() if verdicts[status.id] not in fine or status.overridden]
    shown = [wrapped(_wrong(status, verdicts[status.id]), width) for status in bad[:_MOST]]
    shown += [f"... and {len(bad) - _MOST} more"] if len(bad) > _MOST else []
    parts = [wrapped(head, width), by_area(verdicts, areas, width), *(["\n".join(shown)] if shown else [])]
    return "\n\n".join(parts)


def _counts(statuses: Mapping[str, PatchStatus]) -> str:
    """How many patches are in which state, in a sentence or two."""
    found = Counter(words.of(status) for status in statuses.values())
    pending = words.Verdict.PENDING
    when = f" A {pending.word} patch is applied when the program imports its library." if found[pending] else ""
    return ", ".join(f"{count} {verdict.word}" for verdict, count in found.items()) + f".{when}"


class Statuses(dict[str, PatchStatus]):
    """The status of each patch, by id. ``print`` shows how many are in which state, and what is wrong."""

    def __init__(self, found: Mapping[str, PatchStatus], areas: Mapping[str, str]) -> None:
        super().__init__(found)
        self._areas = areas

    def __str__(self) -> str:
        return (
            f"{overview_text(self, self._areas, f'In this process: {_counts(self)}', _WIDTH)}\n\n"
            "One: status()[ID].reason. All, a line each: `gemma4-compat status --verbose`."
        )


#: Characters of a line where a program prints, and how many patches that need attention are listed, on two lines each.
_WIDTH, _MOST = 80, 3


def _wrong(status: PatchStatus, verdict: words.Verdict) -> str:
    taken = f"another library replaced {', '.join(status.overridden)}" if status.overridden else status.reason
    text = f"{status.id}, {verdict.word}: {taken}"
    longest = 2 * _WIDTH - 20  # a line may end early
    return text if len(text) <= longest else text[: longest - 3] + "..."


def by_area(verdicts: Mapping[str, words.Verdict], areas: Mapping[str, str], width: int | None = None) -> str:
    """How many patches of each area have which verdict, as a table; good verdicts come first."""
    order = [one.word for one in sorted(words.Verdict, key=lambda one: not one.good) if one in verdicts.values()]
    return counts_text("area", {name: (areas[name], verdict.word) for name, verdict in verdicts.items()}, order, width)


def patches_text(patches: tuple[Patch, ...], width: int | None = None) -> str:
    """One line a patch: id, area, affected releases, summary."""
    rows = [(patch.id, patch.area, f"{patch.distribution} {patch.affected}", patch.summary) for patch in patches]
    return table_text(rows, width=width)


def areas_text(areas: Mapping[str, str], about: Mapping[str, str], width: int | None = None) -> str:
    """A screen: each area, how many patches it has, and what they are for.

    Args:
        areas: the area of each patch.
        about: what those of an area are for.
        width: characters of a line; None: any.
    """
    count = Counter(areas.values())
    rows = [("area", "patches", "for"), *((area, str(count[area]), about[area]) for area in sorted(count))]
    end = f"{len(areas)} patches. Those of an area: `gemma4-compat list AREA`; all: `gemma4-compat list --verbose`."
    return f"{table_text(rows, header=True, width=width)}\n\n{wrapped(end, width)}"


def index_text(name: str, patches: Sequence[Patch], width: int | None = None) -> str:
    """The ids of patches in columns, as a screen shows them; ``name`` is what they have in common."""
    widest = max(len(patch.id) for patch in patches) + 2
    columns = max(1, (width or 80) // widest)
    rows = -(-len(patches) // columns)
    lines = ["".join(f"{patch.id:{widest}}" for patch in patches[at::rows]).rstrip() for at in range(rows)]
    head = wrapped(f"{len(patches)} patches of {name}; one by itself: gemma4-compat explain ID", width)
    return "\n".join([head, *lines])


def explanation_text(patch: Patch, status: PatchStatus, width: int | None = None) -> str:
    """Everything known about one patch, for a reader."""
    rows = [
        ("kind", f"{patch.kind}, for {patch.acts_on}"),
        ("affected", f"{patch.distribution} {patch.affected}" + "".join(f", {text}" for text in patch.requires)),
        ("measured up to", patch.measured),
        ("fixed in", patch.fixed or "no release so far"),
        ("upstream", "\n".join(filter(None, (*patch.bug, patch.applied_upstream))) or "not reported"),
        ("replaces", "\n".join(str(target) for target in patch.targets)),
        ("needs", "\n".join(patch.needs) or "no other patch"),
        ("here", f"{words.of(status).word}: {status.reason}"),
        ("opt out", f"GEMMA4_COMPAT_DISABLE={patch.id}"),
    ]
    # A value of several lines is several rows, the first with the name.
    fields = [(name * (index == 0), line) for name, value in rows for index, line in enumerate(value.split("\n"))]
    head = f"{patch.id} ({patch.area})\n{paragraphs(patch.documentation, width)}"
    return f"{head}\n\n{table_text(fields, width=width)}"


def failure_text(status: PatchStatus, symptom: str) -> str:
    """The warning that a patch was not applied, or only in part, and that a ``symptom`` therefore stays."""
    happened = "was not applied, nothing was changed"
    if status.state is PatchState.APPLIED:
        happened = "was applied in part"
    without = f"Without it: {symptom} " if symptom else ""
    seen = f" [{', '.join(f'{name} {version}' for name, version in status.versions.items())}]"
    return (
        f"patch {status.id!r} {happened}: {status.reason}{seen if status.versions else ''}. {without}"
        f"(`gemma4-compat doctor {status.id}` looks whether it is still so). Please "
        f"{address.report_request()}; GEMMA4_COMPAT_DISABLE={status.id} silences this."
    )
