"""Requirements as a project's files write them, and what all of them together state about one distribution."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename

from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._needed import ranges
from gemma4_compat._needed.state import DistributionState

#: Characters of a requirement with its marker; the longest markers that resolvers write have 2,000.
LONGEST = 10_000
#: What most lines of most files are: nothing has to be parsed where it is about another distribution.
_PLAIN = re.compile(r"([A-Za-z0-9]+(?:[._-]+[A-Za-z0-9]+)*)(?: ?==[0-9]+(?:\.[0-9]+)*)?", re.ASCII)


@functools.lru_cache(maxsize=1024)  # a file that was put together of many has most lines many times
def _requirement(text: str) -> Requirement:
    return Requirement(text)


@dataclass(frozen=True)
class Request:
    """One requirement. ``installed_from`` is what it installs from where that does not state the release."""

    name: str
    specifier: str
    where: str
    installed_from: str = ""


@dataclass
class Requests:
    """What a requirements file or a pyproject.toml requires, always or with an extra or a group.

    Requirements of other distributions than ``names`` are left out.
    """

    names: tuple[str, ...]
    always: list[Request] = field(default_factory=list)
    optional: dict[str, list[Request]] = field(default_factory=dict)
    constraints: list[Request] = field(default_factory=list)
    overrides: list[Request] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def state(self, name: str, source: str) -> DistributionState:
        """What all of it together states about one distribution."""
        always = about(name, self.always)
        # Extras only narrow what the project always requires: where it requires something, that decides.
        ways = {"": always} if always else {label: about(name, items) for label, items in self.optional.items()}
        ways = {label: items for label, items in ways.items() if items}
        limits = list({(item.specifier, item.installed_from): item for item in about(name, self.constraints)}.values())
        _refuse_many(name, (item.specifier for item in limits))
        if overrides := about(name, self.overrides):
            ways, limits = dict.fromkeys(ways, overrides), overrides if not ways else []
        absence = "" if ways else f"not named in {source}"
        stated = list(ways.values()) or [[]]
        unstated = next((item for items in (*stated, limits) for item in items if item.installed_from), None)
        if unstated is not None:
            installed_from = f"{unstated.installed_from} ({unstated.where})"
            return DistributionState(distribution=name, installed_from=installed_from, absence=absence)
        found: dict[str, None] = {}
        limit = ranges.normalized(*(item.specifier for item in limits))
        for own, items in _different(stated).items():
            specifier = ranges.normalized(*own, limit)
            _refuse_many(name, [*found, specifier])
            if not ranges.admitted((specifier,)):
                where = ", ".join(dict.fromkeys(item.where for item in (*items, *limits)))
                raise Gemma4CompatError(
                    f"no release of {name} can be {specifier} ({where}): change one of these bounds"
                )
            found[specifier] = None
        return DistributionState(
            distribution=name,
            ranges=tuple(found),
            absence=absence,
            origin=", ".join(filter(None, ways)),
        )

    def parse(self, text: str, where: str, *, extra: str = "") -> list[Request]:
        """One requirement (PEP 508, or a path or URL as pip takes them); nothing when it is not about ``names``."""
        if len(text) > LONGEST:
            raise Gemma4CompatError(
                f"{where}: a requirement of {len(text)} characters, and at most {LONGEST} are read; correct it"
            )
        archive = re.search(r"\.(whl|zip|tar\.[a-z0-9]+)$", text.partition(" ")[0])
        if not archive and (plain := _PLAIN.fullmatch(text)) and canonicalize_name(plain[1]) not in self.names:
            return []
        try:
            requirement = None if archive and " @ " not in text else _requirement(text)
        # InvalidRequirement is a ValueError; packaging 22 evaluates strings.
        except (ValueError, SyntaxError, RecursionError):
            if not re.match(r"[./~\\]|[A-Za-z]:\\|[A-Za-z0-9+]+://|file:|[^\s=<>~!;@]+[/\\]", text):
                hint = (
                    "write it as 'transformers>=5.5', with an operator, a comma between bounds, and ; before a marker"
                )
                # The text is not in the cause either.
                raise Gemma4CompatError(f"{where}: {self._shown(text)} is not a requirement; {hint}") from None
            requirement = None
        if requirement is None:
            marker = re.search(r";\s", text)
            location = text if marker is None else text[: marker.start()].rstrip()
            condition = None if marker is None else parse_marker(text[marker.end() :], where, shown=False)
            return self._parse_location(location, condition, where, extra)
        name = canonicalize_name(requirement.name)
        if name not in self.names or not self._holds(requirement.marker, name, where, extra):
            return []
        if requirement.url:
            return [_from_location(name, requirement.url, where)]
        for clause in requirement.specifier:
            if len(clause.version) > ranges.LONGEST:
                raise Gemma4CompatError(f"{where}: a version has {len(clause.version)} characters; correct it")
            if clause.operator == "===" and not ranges.is_version(clause.version):
                return [Request(name, "", where, text)]
        return [Request(name, str(requirement.specifier), where)]

    def _parse_location(self, location: str, marker: Marker | None, where: str, extra: str) -> list[Request]:
        """A path or URL without a name before it."""
        name = _in_file_name(location)[0]
        remote = "://" in location
        if name is None:
            egg = re.search(r"[#&]egg=([A-Za-z0-9._-]+)", location)
            parts = re.split(r"[/\\]", re.split(r"[?#]", location)[0].rstrip("/\\"))
            parts = [canonicalize_name(re.split(r"[@\[]", part)[0].removesuffix(".git")) for part in parts]
            named = [canonicalize_name(egg[1])] if egg else parts if remote else parts[-1:]
            name = next((part for part in named if part in self.names), None)
            if name is None and not remote:
                path = re.sub(r"\[.*\]$", "", location)
                shown = location if os.path.exists(path) else "this path"  # noqa: PTH110 - Path raises for odd names
                self.notes.append(f"{where}: what {shown} requires is not looked into; check its own file as well")
        if name not in self.names or not self._holds(marker, name, where, extra):
            return []
        return [_from_location(name, location, where)]

    def _shown(self, text: str) -> str:
        """A line for a message. One that is not about ``names`` may be of another file, with a secret in it."""
        name = re.match(r"[A-Za-z0-9._-]+", text)
        return repr(text) if name and canonicalize_name(name[0]) in self.names else "what is there"

    def _holds(self, marker: Marker | None, name: str, where: str, extra: str = "") -> bool:
        if marker is None or evaluate(marker, where, extra):
            return True
        self.notes.append(f"{where}: {name} is left out, its marker is false here: {marker}")
        return False


def _different(stated: Iterable[list[Request]]) -> dict[tuple[str, ...], list[Request]]:
    """The lists that state different bounds, by these: 20,000 extras that state the same are tried once."""
    found: dict[tuple[str, ...], list[Request]] = {}
    for items in stated:
        found.setdefault(tuple(dict.fromkeys(item.specifier for item in items)), items)
    return found


def _refuse_many(name: str, specifiers: Iterable[str]) -> None:
    """Every bound is tried with every other, and no project states many."""
    count = sum(specifier.count(",") + 1 for specifier in dict.fromkeys(specifiers) if specifier)
    if count > ranges.MOST_BOUNDS:
        raise Gemma4CompatError(
            f"{count} bounds are stated for the releases of {name}, and at most {ranges.MOST_BOUNDS} are judged; "
            "state fewer"
        )


def shortened(text: str, limit: int = 200) -> str:
    """The beginning of a text, for a message."""
    return text if len(text) <= limit else f"{text[:limit]}..."


def about(name: str, requests: Iterable[Request]) -> list[Request]:
    """The requests that are about one distribution."""
    return [item for item in requests if item.name == name]


def without_credentials(location: str) -> str:
    """A URL as pip shows it."""
    return re.sub(r"//[^/@\s]*@", "//****@", location)


def parse_marker(text: str, where: str, *, shown: bool = True) -> Marker:
    """An environment marker (PEP 508). ``shown``: whether an error may hold its text.

    Raises:
        Gemma4CompatError: it is not one, or needs a newer packaging.
    """
    try:
        return Marker(text)
    except (ValueError, SyntaxError, RecursionError) as error:
        remedy = "pip install -U packaging" if re.search("extras|dependency_groups", text) else "correct it"
        what = f"the marker {shortened(text)!r}" if shown else "the marker"
        raise Gemma4CompatError(f"{where}: {what} cannot be read; {remedy}") from (error if shown else None)


def evaluate(marker: Marker, where: str, extra: str = "", lock: Mapping[str, Any] | None = None) -> bool:
    """Whether a marker is true here, with one extra, or with the extras and groups of a lock file."""
    try:
        if lock and re.search(r"\b(extras|dependency_groups)\b", str(marker)):  # known to packaging 25 and newer only
            return marker.evaluate(dict(lock), context="lock_file")
        return marker.evaluate({"extra": extra})
    except (ValueError, RecursionError) as error:  # undefined comparisons, and in packaging 22 invalid versions
        shown, reason = shortened(str(marker)), shortened(str(error))
        raise Gemma4CompatError(f"{where}: the marker {shown!r} has no answer: {reason}; correct it") from error


def _from_location(name: str, location: str, where: str) -> Request:
    version = _in_file_name(location)[1]
    if version:
        return Request(name, f"=={version}", where)
    return Request(name, "", where, without_credentials(location))


def _in_file_name(location: str) -> tuple[str | None, str | None]:
    """Name and release that the file name of a wheel or an sdist states."""
    last = re.split(r"[/\\]", unquote(re.split(r"[?#]", location)[0]))[-1]
    try:
        if last.endswith(".whl"):
            name, version, *_ = parse_wheel_filename(last)
        elif last.endswith((".tar.gz", ".zip")):
            name, version = parse_sdist_filename(last)
        else:
            return None, None
    except ValueError:  # InvalidWheelFilename and InvalidSdistFilename are one, and int() raises others
        return None, None
    return str(name), str(version)
