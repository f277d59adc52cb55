"""Which patches a stack still needs, and which releases make each unnecessary: ``gemma4-compat needed``.

It compares the patches' metadata with what a file states about releases; no network, no list of releases.
"""

from __future__ import annotations

import enum
import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from gemma4_compat._engine import versions
from gemma4_compat._engine.io.text import counts_text, wrapped
from gemma4_compat._engine.patch import Patch
from gemma4_compat._errors import printable
from gemma4_compat._needed import files, ranges, state
from gemma4_compat._needed.state import DistributionState


class Verdict(str, enum.Enum):
    """Whether a patch is needed. The first of these that any of its conditions has is the patch's own."""

    NOT_NEEDED = "not_needed"
    UNSUPPORTED = "unsupported"
    DEPENDS = "depends"
    SOME = "needed_by_some"
    NEEDED = "needed"

    __str__ = str.__str__

    @property
    def word(self) -> str:
        """What people read: "not needed"."""
        return self.value.replace("_", " ")


_MEANINGS = {
    Verdict.NEEDED: "needed",
    Verdict.SOME: "needed by some of these releases",
    Verdict.DEPENDS: "depend on what is not stated",
    Verdict.UNSUPPORTED: "cannot be judged for releases this old",
    Verdict.NOT_NEEDED: "not needed",
}
#: Characters of a line where a program prints.
_WIDTH = 80


@dataclass(frozen=True, kw_only=True)
class Need:
    """The verdict on one patch.

    Attributes:
        patch: the patch.
        verdict: "needed", "needed_by_some" (of the releases that are possible), "depends" (on what is not stated),
            "unsupported" (the releases are too old) or "not_needed".
        because: the conditions that decided, in a few words.
        unnecessary_with: requirement strings; each of them makes the patch unnecessary. Empty: no release so far.
        unmeasured: a release newer than ``patch.measured`` is possible, where only unchanged code is patched.
    """

    patch: Patch
    verdict: Verdict
    because: str
    unnecessary_with: tuple[str, ...]
    unmeasured: bool


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """Which patches a stack needs; ``print`` shows it on one screen.

    Attributes:
        source: the file, or "this environment".
        distributions: what is stated about each library.
        notes: what is unclear about them, for a reader.
        needs: the verdict on each patch.
    """

    source: str
    distributions: tuple[DistributionState, ...]
    notes: tuple[str, ...]
    needs: tuple[Need, ...]

    @property
    def judged(self) -> bool:
        """Whether any of the libraries is named. If not, this is probably not the file that was meant."""
        return any(item.named for item in self.distributions)

    @property
    def droppable(self) -> bool:
        """Whether nothing needs the package any more."""
        return self.judged and all(item.verdict is Verdict.NOT_NEEDED for item in self.needs)

    @property
    def head(self) -> str:
        """What is judged, in a line."""
        return printable(f"{self.source}: {', '.join(map(str, self.distributions))}")

    @property
    def summary(self) -> str:
        """How many patches have which verdict, in a line."""
        counts = Counter(need.verdict for need in self.needs)
        total = ", ".join(f"{counts[verdict]} {text}" for verdict, text in _MEANINGS.items() if counts[verdict])
        droppable = " gemma4_compat can be dropped." if self.droppable else ""
        return f"{len(self.needs)} patches: {total}.{droppable}"

    def __str__(self) -> str:
        return self.text(_WIDTH)

    def text(self, width: int | None) -> str:
        """A screen of lines up to ``width`` characters (None: any): the sum, and how many of each area are needed."""
        there = {need.verdict for need in self.needs}
        columns = [verdict.word for verdict in reversed(Verdict) if verdict in there]
        found = {need.patch.id: (need.patch.area, need.verdict.word) for need in self.needs}
        notes = [wrapped(f"note: {printable(note)}", width) for note in self.notes]
        parts = [
            wrapped(self.head, width),
            *notes,
            wrapped(self.summary, width),
            counts_text("area", found, columns, width),
            wrapped("Each patch, and what makes it unnecessary: `gemma4-compat needed --verbose`.", width),
        ]
        return "\n\n".join(parts)


def assess(path: Path | None, patches: tuple[Patch, ...]) -> Assessment:
    """Which of ``patches`` the stack in ``path`` needs; without a path, the running environment.

    Raises:
        Gemma4CompatError: the file cannot be understood. The message names file, line and remedy.
    """
    required = [versions.requirement(text)[0] for patch in patches for text in patch.requires]
    names = tuple(dict.fromkeys([*versions.OLDEST, *(patch.distribution for patch in patches), *required]))
    if path is None:
        source, states = "this environment", [state.installed(name) for name in names]
        notes: list[str] = []
    else:
        source = str(path)
        notes, states = files.read(path, names)
    if not any(item.named for item in states):
        notes = [f"{source} has none of {', '.join(names)}: is it the right one?", *notes]
    notes += [
        f"cannot tell the release of {item.distribution}: {item.installed_from}; "
        f"with {item.distribution}==RELEASE in a requirements.txt there is an answer"
        for item in states
        if item.installed_from
    ]
    notes += filter(None, map(_below_oldest, states))
    known = {item.distribution: item for item in states}
    return Assessment(
        source=source,
        distributions=tuple(states),
        notes=tuple(notes),
        needs=tuple(_need(patch, known) for patch in patches),
    )


def _need(patch: Patch, states: Mapping[str, DistributionState]) -> Need:
    conditions = [(patch.distribution, ranges.normalized(patch.affected))]
    for text in patch.requires:
        name, specifier = versions.requirement(text)
        conditions.append((name, ranges.normalized(specifier)))
    findings = [_judge(states[name], specifier) for name, specifier in conditions]
    verdict = next(verdict for verdict in Verdict if any(finding.verdict is verdict for finding in findings))
    # What leaves it needed is everything together; what makes it anything else is enough by itself.
    deciding = [item for item in findings if item.verdict is verdict or verdict in (Verdict.SOME, Verdict.NEEDED)]
    return Need(
        patch=patch,
        verdict=verdict,
        because="; ".join(item.because for item in deciding),
        unnecessary_with=tuple(filter(None, (ranges.above(name, specifier) for name, specifier in conditions))),
        unmeasured=verdict in (Verdict.SOME, Verdict.NEEDED) and _unmeasured(patch, states[patch.distribution]),
    )


def _unmeasured(patch: Patch, stated: DistributionState) -> bool:
    """Whether an affected release newer than the measured ones is possible.

    Where there is a fix, the measured release was the last one before it: then only a pin can be newer.
    """
    if patch.fixed is not None and None in map(ranges.pin, stated.ranges):
        return False
    return any(
        versions.newer(number.public, than=patch.measured) and versions.admits(patch.affected, str(number))
        for number in ranges.admitted(stated.ranges, patch.affected, f"=={patch.measured}")
    )


@dataclass(frozen=True)
class _Finding:
    verdict: Verdict
    because: str


@functools.cache
def _judge(stated: DistributionState, specifier: str) -> _Finding:
    """Whether the stated releases of one distribution are inside one specifier."""
    name, floor = stated.distribution, _floor(stated.distribution)
    if stated.installed_from:
        if not specifier:
            return _Finding(Verdict.NEEDED, f"{name}, whichever release")
        return _Finding(Verdict.DEPENDS, f"cannot tell the release of {name}")
    if not stated.ranges:
        return _Finding(Verdict.NOT_NEEDED, str(stated))
    possible = ranges.admitted(stated.ranges, specifier, floor)
    supported = [number for number in possible if versions.admits(floor, str(number))]
    if not supported:
        return _Finding(Verdict.UNSUPPORTED, f"{name} {stated.releases} is below {versions.OLDEST[name]}")
    inside = [number for number in supported if versions.admits(specifier, str(number))]
    if not inside:
        return _Finding(Verdict.NOT_NEEDED, f"{name} {stated.releases} is outside {specifier}")
    if stated.absence:
        return _Finding(Verdict.DEPENDS, str(stated))
    if len(inside) == len(supported):
        return _Finding(Verdict.NEEDED, str(stated))
    return _Finding(Verdict.SOME, f"{name} {_affected_part(stated, specifier, supported)}")


def _affected_part(stated: DistributionState, specifier: str, supported: list[Version]) -> str:
    """The affected releases among those that are possible: the pins, or the clauses that exclude something."""
    pins = [ranges.pin(text) for text in stated.ranges]
    if None not in pins:
        return ranges.text(text for text, pin in zip(stated.ranges, pins) if versions.admits(specifier, str(pin)))
    clauses = specifier.split(",")
    return ",".join(one for one in clauses if not all(versions.admits(one, str(number)) for number in supported))


def _below_oldest(stated: DistributionState) -> str | None:
    """What to say, once, about releases older than the supported ones."""
    floor = _floor(stated.distribution)
    if not any(stated.ranges) or not floor:  # "any release" does not ask for an old one
        return None
    numbers = ranges.admitted(tuple(filter(None, stated.ranges)), floor)
    outside = [number for number in numbers if not versions.admits(floor, str(number))]
    if not outside:
        return None
    verb = "is" if len(outside) == len(numbers) else "admits releases"
    name, oldest = stated.distribution, versions.OLDEST[stated.distribution]
    return f"{name} {stated.releases} {verb} below {oldest}, the oldest supported: ask for {name}>={oldest}"


def _floor(distribution: str) -> str:
    oldest = versions.OLDEST.get(distribution)
    return f">={oldest}" if oldest else ""
