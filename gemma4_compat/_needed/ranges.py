"""Specifiers as ranges of releases, without a list of the releases that exist.

A range is judged on the numbers at and around every bound of the specifiers involved: between two neighbouring bounds
every number gives the same result.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from gemma4_compat._engine import versions

#: Characters of a version number, and bounds of one distribution; real ones have 30 and 10.
LONGEST, MOST_BOUNDS = 200, 100

_MANY = 10**9  # larger than any part of a real version number


def is_version(text: str) -> bool:
    """Whether ``text`` is a version number (PEP 440)."""
    try:
        return len(text) <= LONGEST and bool(Version(text))
    except InvalidVersion:
        return False


def normalized(*specifiers: str) -> str:
    """Specifiers as one: every clause once, lower bounds, then upper bounds, then exceptions."""
    clauses = dict.fromkeys(clause for text in specifiers for clause in text.replace(" ", "").split(",") if clause)
    # The two differ only in spelling: 1.0 is 1.0.0.
    plain = [re.sub("^===", "==", clause) for clause in clauses]
    return ",".join(sorted(plain, key=lambda clause: (clause.startswith("!"), clause.startswith("<"), clause)))


def pin(specifier: str) -> str | None:
    """The one release that a specifier admits, if it pins one."""
    found = re.fullmatch(r"==([^,*]+)", specifier)
    return found[1] if found else None


def text(specifiers: Iterable[str]) -> str:
    """Alternative ranges for a reader: ``1.13.0 or >=1.14``."""
    return " or ".join((pin(specifier) or specifier) if specifier else "any release" for specifier in specifiers)


def admitted(ranges: tuple[str, ...], *others: str) -> list[Version]:
    """The numbers at and around every bound of all these specifiers that are inside one of ``ranges``, ascending.

    Pre-releases count only where a range names one, as installers have it.
    """
    return list(_admitted(ranges, others))


@functools.cache
def _admitted(ranges: tuple[str, ...], others: tuple[str, ...]) -> tuple[Version, ...]:
    numbers = _around(*ranges, *others)
    return tuple(number for number in numbers if any(_offers(specifier, number) for specifier in ranges))


@functools.cache
def above(distribution: str, specifier: str) -> str | None:
    """The releases newer than all that a specifier admits, as a requirement string; None when it has no upper end."""
    bounds = {bound: bound for bound in _bounds(specifier)}
    numbers = [number for number in _around(specifier) if number in bounds or not number.is_prerelease]
    last = max(index for index, number in enumerate(numbers) if versions.admits(specifier, str(number)))
    if last + 1 == len(numbers):
        return None
    if numbers[last + 1] in bounds:
        return f"{distribution}>={bounds[numbers[last + 1]]}"
    return f"{distribution}>{numbers[last]}"


def _offers(specifier: str, number: Version) -> bool:
    if number.is_prerelease and not any(
        bound.is_prerelease
        for clause in specifier.split(",")
        if not clause.startswith("!=")
        for bound in _bounds(clause)
    ):
        return False
    return versions.admits(specifier, str(number))


def _around(*specifiers: str) -> list[Version]:
    """Every bound, and between any two neighbouring bounds at least one number; ascending."""
    bounds = {bound for specifier in specifiers for bound in _bounds(specifier)} | {Version("0")}
    depth = max(len(bound.release) for bound in bounds)
    return sorted({near for bound in bounds for near in _near(bound, depth)})


@functools.cache
def _bounds(specifier: str) -> tuple[Version, ...]:
    """Where the result of a specifier may change."""
    found = []
    for clause in SpecifierSet(specifier):
        bound = Version(clause.version.removesuffix(".*"))
        found.append(bound)
        prefix = bound.release[:-1] if clause.operator == "~=" else bound.release
        if clause.operator == "~=" or clause.version.endswith(".*"):
            found.append(_number(bound, (*prefix[:-1], prefix[-1] + 1)))
    return tuple(found)


def _near(bound: Version, depth: int) -> Iterator[Version]:
    """A bound, its own pre- and post-releases, and the release just above it. (0 is below the lowest bound.)"""
    yield bound
    for suffix in (".dev0", "a0", f"rc{_MANY}", "", f".post{_MANY}"):
        yield _number(bound, bound.release, suffix)
    if bound.pre and bound.post is None and bound.dev is None:
        yield Version(f"{bound.public}.post{_MANY}")
    yield Version(re.sub(r"\d+$", lambda last: str(int(last[0]) + 1), bound.public))
    yield _number(bound, (*bound.release, *[0] * (depth - len(bound.release)), 1))


def _number(like: Version, release: Iterable[int], suffix: str = "") -> Version:
    return Version(f"{like.epoch}!{'.'.join(map(str, release))}{suffix}")
