"""``doctor``, for the command line and for programs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from gemma4_compat import _shim
from gemma4_compat._doctor.reproductions import findings, text
from gemma4_compat._doctor.reproductions.findings import Finding
from gemma4_compat._engine import settings
from gemma4_compat._engine.io import terminal
from gemma4_compat._engine.io.text import wrapped
from gemma4_compat._engine.patch import Patch
from gemma4_compat._engine.reports import report
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat.patches import registry

#: Characters of a line where a program prints.
_WIDTH = 80


@dataclass(frozen=True)
class Diagnosis:
    """What ``doctor`` found; ``print`` shows it on one screen.

    Attributes:
        versions: the installed release of each library.
        findings: one for each patch that was examined, in the order in which patches are applied.
        seconds: how long it took.
    """

    versions: dict[str, str]
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether no defect remains and nothing failed."""
        return all(item.good for item in self.findings)

    @property
    def summary(self) -> str:
        """How many defects are repaired here, in a line."""
        return text.summary(self.findings)

    def text(self, width: int | None, *, more: str, colour: bool = False) -> str:
        """The summary first and last, what needs attention, the rest by area; lines of up to ``width`` characters.

        ``more`` says where the details are.
        """
        summary = wrapped(self.summary, width)
        bad = [item for item in self.findings if not item.good or item.report]
        shown = [text.finding_text(item, "", width, colour=colour) for item in bad]
        verdicts = {item.id: item.verdict for item in self.findings}
        times = wrapped(f"{text.times(self.findings, self.seconds)} What each defect did here: {more}.", width)
        areas = {item.id: registry.AREA_OF[item.id] for item in self.findings}
        return "\n\n".join([summary, *shown, report.by_area(verdicts, areas, width), times, summary])

    def __str__(self) -> str:
        return self.text(_WIDTH, more=".findings")


def doctor(*ids: str, keep: bool = False, progress: bool = True) -> Diagnosis:
    """Reproduce each defect on a tiny random Gemma 4, without and with its fix, in processes of their own.

    >>> diagnosis = gemma4_compat.doctor()
    >>> print(diagnosis)
    >>> assert diagnosis.ok

    All of them take about a minute on two cores. No model is downloaded, and no GPU is needed. The processes import
    what is installed, configured as the environment says; nothing happens to models of this process.
    ``gemma4-compat doctor`` is the same as a command.

    Args:
        ids: the patches to examine; default: all.
        keep: keep the folder with the tiny checkpoints, and say on standard error where it is.
        progress: say on standard error how far it is.

    Raises:
        Gemma4CompatError: no patch has such an id; a library is missing, or older than the oldest supported release;
            or the tiny checkpoint cannot be built.
    """
    patches = chosen(ids)
    versions = findings.stack()
    began = time.monotonic()
    found: list[Finding] = []

    def note(line: str) -> None:
        terminal.write(f"gemma4_compat: {line}", error=True)

    tenths = {-(-len(patches) * tenth // 10) for tenth in range(1, 11)}
    if progress:
        note(f"reproducing {len(patches)} defects, without and with the fix; first, tiny models are built")
    with contextlib.closing(findings.examine(patches, keep=keep, note=note)) as examined:
        for finding in examined:
            found.append(finding)
            if progress and len(found) in tenths:
                note(f"[{len(found)}/{len(patches)}] after {time.monotonic() - began:.0f} s")
    return Diagnosis(versions, ordered(found, patches), time.monotonic() - began)


def ordered(found: Sequence[Finding], patches: Sequence[Patch]) -> tuple[Finding, ...]:
    """The findings in the order of the patches."""
    order = {patch.id: index for index, patch in enumerate(patches)}
    return tuple(sorted(found, key=lambda finding: order[finding.id]))


def chosen(ids: Sequence[str]) -> tuple[Patch, ...]:
    """The patches that have these ids; all, without ids.

    Raises:
        Gemma4CompatError: no patch has such an id.
    """
    known = {patch.id: patch for patch in _shim.patches()}
    for patch_id in ids:
        if not isinstance(patch_id, str) or patch_id not in known:
            raise Gemma4CompatError(settings.unknown_id(patch_id, known))
    return tuple(patch for patch in known.values() if patch.id in ids or not ids)
