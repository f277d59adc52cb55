"""Which patches a stack still needs, and which releases make each unnecessary: ``gemma4-compat needed``.

It knows what patches say about themselves and what a file says about releases; no network, no list of releases. A
range is judged on the numbers at and around every bound of the specifiers involved: between two neighbouring bounds
every number gets the same answer.
"""

from __future__ import annotations

import codecs
import enum
import functools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

from gemma4_compat._engine import versions as _versions
from gemma4_compat._engine.patch import Patch
from gemma4_compat._errors import Gemma4CompatError

ACCEPTED = "requirements.txt (or any .txt or .in), pyproject.toml, pylock.toml, pylock.NAME.toml or uv.lock"
_MANY = 10**9  # larger than any part of a real version number


class Verdict(str, enum.Enum):
    """Whether a patch is needed. The first of these that any of its conditions has is the patch's own."""

    NOT_NEEDED = "not_needed"
    UNSUPPORTED = "unsupported"
    DEPENDS = "depends"
    SOME = "needed_by_some"
    NEEDED = "needed"

    __str__ = str.__str__


@dataclass(frozen=True, kw_only=True)
class Stand:
    """What is said about one distribution.

    Attributes:
        distribution: its name.
        ranges: PEP 440 specifiers, "" for any release; the release is inside one of them. Empty: absent, or `untold`.
        absence: how to say that it is absent or may be ("not installed"); empty when it is certainly there.
        untold: what it is installed from, when that does not tell the release.
        origin: the extras or groups without which it is not asked for.
    """

    distribution: str
    ranges: tuple[str, ...] = ()
    absence: str = ""
    untold: str = ""
    origin: str = ""

    def __str__(self) -> str:
        if self.untold:
            return f"{self.distribution} from {self.untold}"
        if self.absence:
            limited = f" (there, it would be {_shown(self.ranges)})" if any(self.ranges) else ""
            return f"{self.distribution} {self.absence}{limited}"
        return f"{self.distribution} {_shown(self.ranges)}" + (f" ({self.origin})" if self.origin else "")

    @property
    def named(self) -> bool:
        """Whether something says that it is there."""
        return not self.absence


@dataclass(frozen=True, kw_only=True)
class Need:
    """The verdict on one patch.

    Attributes:
        patch: the patch.
        verdict: see :class:`Verdict`.
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
class Answer:
    """Everything the command says: about the libraries, and about each patch in the registry's order."""

    source: str
    stands: tuple[Stand, ...]
    notes: tuple[str, ...]
    needs: tuple[Need, ...]

    @property
    def judged(self) -> bool:
        """Whether any of the libraries is there. If not, this is probably not the file that was meant."""
        return any(stand.named for stand in self.stands)

    @property
    def droppable(self) -> bool:
        """Whether nothing needs the package any more. A patch that must be asked for by name does not hold it back."""
        return self.judged and all(item.verdict is Verdict.NOT_NEEDED or item.patch.opt_in for item in self.needs)


def answer(path: Path | None, patches: tuple[Patch, ...]) -> Answer:
    """What of ``patches`` the stack in ``path`` needs, or the running environment when there is none.

    Raises:
        Gemma4CompatError: the file cannot be understood. The message names file, line and remedy.
    """
    required = [_versions.requirement(text)[0] for patch in patches for text in patch.requires]
    names = tuple(dict.fromkeys([*_versions.OLDEST, *(patch.distribution for patch in patches), *required]))
    if path is None:
        source, stands = "this environment", [_installed(name) for name in names]
        notes: list[str] = []
    else:
        source = str(path)
        notes, stands = _reader(path)(path, names)
    if not any(stand.named for stand in stands):
        notes = [f"{source} has none of {', '.join(names)}: is it the right one?", *notes]
    notes += [
        f"cannot tell the release of {stand.distribution}: {stand.untold}; "
        f"with {stand.distribution}==RELEASE in a requirements.txt there is an answer"
        for stand in stands
        if stand.untold
    ]
    notes += filter(None, map(_below, stands))
    known = {stand.distribution: stand for stand in stands}
    return Answer(
        source=source,
        stands=tuple(stands),
        notes=tuple(notes),
        needs=tuple(_need(patch, known) for patch in patches),
    )


# ------------------------------------------------------------------------------------------------------------ judging


def _need(patch: Patch, stands: Mapping[str, Stand]) -> Need:
    conditions = [(patch.distribution, _tidy(patch.affected))]
    for text in patch.requires:
        name, specifier = _versions.requirement(text)
        conditions.append((name, _tidy(specifier)))
    findings = [_judge(stands[name], specifier) for name, specifier in conditions]
    verdict = next(verdict for verdict in Verdict if any(finding.verdict is verdict for finding in findings))
    # What leaves it needed is everything together; what makes it anything else is enough by itself.
    deciding = [item for item in findings if item.verdict is verdict or verdict in (Verdict.SOME, Verdict.NEEDED)]
    return Need(
        patch=patch,
        verdict=verdict,
        because="; ".join(item.because for item in deciding),
        unnecessary_with=tuple(filter(None, (beyond(name, specifier) for name, specifier in conditions))),
        unmeasured=verdict in (Verdict.SOME, Verdict.NEEDED) and _unmeasured(patch, stands[patch.distribution]),
    )


def _unmeasured(patch: Patch, stand: Stand) -> bool:
    """Whether an affected release newer than the measured ones is possible.

    Where there is a fix, the measured release was the last one before it: then only a pin can be newer.
    """
    if patch.fixed is not None and None in map(_pin, stand.ranges):
        return False
    return any(
        _versions.newer(number.public, than=patch.measured) and _versions.admits(patch.affected, str(number))
        for number in admitted(stand.ranges, patch.affected, f"=={patch.measured}")
    )


@dataclass(frozen=True)
class _Finding:
    verdict: Verdict
    because: str


@functools.cache
def _judge(stand: Stand, specifier: str) -> _Finding:
    """Whether what is said about one distribution lies inside one specifier."""
    name, floor = stand.distribution, _floor(stand.distribution)
    if stand.untold:
        if not specifier:
            return _Finding(Verdict.NEEDED, f"{name}, whichever release")
        return _Finding(Verdict.DEPENDS, f"cannot tell the release of {name}")
    if not stand.ranges:
        return _Finding(Verdict.NOT_NEEDED, str(stand))
    supported = [number for number in admitted(stand.ranges, specifier, floor) if _versions.admits(floor, str(number))]
    if not supported:
        return _Finding(Verdict.UNSUPPORTED, f"{name} {_shown(stand.ranges)} is below {_versions.OLDEST[name]}")
    inside = [number for number in supported if _versions.admits(specifier, str(number))]
    if not inside:
        return _Finding(Verdict.NOT_NEEDED, f"{name} {_shown(stand.ranges)} is outside {specifier}")
    if stand.absence:
        return _Finding(Verdict.DEPENDS, str(stand))
    if len(inside) == len(supported):
        return _Finding(Verdict.NEEDED, str(stand))
    return _Finding(Verdict.SOME, f"{name} {_part(stand.ranges, specifier, supported)}")


def _part(ranges: tuple[str, ...], specifier: str, supported: list[Version]) -> str:
    """The affected releases among those that are possible: the pins, or the clauses that exclude something."""
    pins = [_pin(text) for text in ranges]
    if None not in pins:
        return _shown([text for text, pin in zip(ranges, pins) if _versions.admits(specifier, str(pin))])
    clauses = specifier.split(",")
    return ",".join(one for one in clauses if not all(_versions.admits(one, str(number)) for number in supported))


@functools.cache
def beyond(distribution: str, specifier: str) -> str | None:
    """The newer releases that a specifier leaves out, as a requirement string; None when it has no end."""
    bounds = {bound: bound for bound in _bounds(specifier)}
    numbers = [number for number in releases(specifier) if number in bounds or not number.is_prerelease]
    last = max(index for index, number in enumerate(numbers) if _versions.admits(specifier, str(number)))
    if last + 1 == len(numbers):
        return None
    if numbers[last + 1] in bounds:
        return f"{distribution}>={bounds[numbers[last + 1]]}"
    return f"{distribution}>{numbers[last]}"


@functools.cache
def _below(stand: Stand) -> str | None:
    """What to say, once, about releases older than the supported ones."""
    floor = _floor(stand.distribution)
    if not any(stand.ranges) or not floor:  # "any release" is not a wish for an old one
        return None
    numbers = admitted(tuple(filter(None, stand.ranges)), floor)
    outside = [number for number in numbers if not _versions.admits(floor, str(number))]
    if not outside:
        return None
    verb = "is" if len(outside) == len(numbers) else "admits releases"
    name, oldest = stand.distribution, _versions.OLDEST[stand.distribution]
    return f"{name} {_shown(stand.ranges)} {verb} below {oldest}, the oldest supported: ask for {name}>={oldest}"


def _floor(distribution: str) -> str:
    oldest = _versions.OLDEST.get(distribution)
    return f">={oldest}" if oldest else ""


# ------------------------------------------------------------------------------------------------- numbers and ranges


def admitted(ranges: tuple[str, ...], *others: str) -> list[Version]:
    """The numbers at and around every bound of all these specifiers that are inside one of ``ranges``, ascending.

    Pre-releases count only where a range names one, as installers have it.
    """
    numbers = releases(*ranges, *others)
    return [number for number in numbers if any(_offers(text, number) for text in ranges)]


def _offers(text: str, number: Version) -> bool:
    if number.is_prerelease and not any(
        bound.is_prerelease for clause in text.split(",") if not clause.startswith("!=") for bound in _bounds(clause)
    ):
        return False
    return _versions.admits(text, str(number))


def releases(*specifiers: str) -> list[Version]:
    """Every bound, and between any two neighbouring bounds at least one number; ascending."""
    bounds = {bound for text in specifiers for bound in _bounds(text)} | {Version("0")}
    depth = max(len(bound.release) for bound in bounds)
    return sorted({near for bound in bounds for near in _near(bound, depth)})


@functools.cache
def _bounds(specifier: str) -> tuple[Version, ...]:
    """Where the answer of a specifier may change."""
    found = []
    for clause in SpecifierSet(specifier):
        bound = Version(clause.version.removesuffix(".*"))
        found.append(bound)
        prefix = bound.release[:-1] if clause.operator == "~=" else bound.release
        if clause.operator == "~=" or clause.version.endswith(".*"):
            found.append(_number(bound, (*prefix[:-1], prefix[-1] + 1)))
    return tuple(found)


def _near(bound: Version, depth: int) -> Iterator[Version]:
    """A bound, its own pre- and post-releases, and the release just above it. (Below the lowest bound there is 0.)"""
    yield bound
    for suffix in (".dev0", "a0", f"rc{_MANY}", "", f".post{_MANY}"):
        yield _number(bound, bound.release, suffix)
    if bound.pre and bound.post is None and bound.dev is None:
        yield Version(f"{bound.public}.post{_MANY}")
    yield Version(re.sub(r"\d+$", lambda last: str(int(last[0]) + 1), bound.public))
    yield _number(bound, (*bound.release, *[0] * (depth - len(bound.release)), 1))


def _number(like: Version, release: Iterable[int], suffix: str = "") -> Version:
    return Version(f"{like.epoch}!{'.'.join(map(str, release))}{suffix}")


def _tidy(*specifiers: str) -> str:
    """Specifiers as one: every clause once, lower bounds, then upper bounds, then exceptions."""
    clauses = dict.fromkeys(clause for text in specifiers for clause in text.replace(" ", "").split(",") if clause)
    # The two differ only in spelling: 1.0 is 1.0.0.
    plain = [re.sub("^===", "==", clause) for clause in clauses]
    return ",".join(sorted(plain, key=lambda clause: (clause.startswith("!"), clause.startswith("<"), clause)))


def _pin(specifier: str) -> str | None:
    found = re.fullmatch(r"==([^,*]+)", specifier)
    return found[1] if found else None


def _shown(ranges: Iterable[str]) -> str:
    return " or ".join((_pin(text) or text) if text else "any release" for text in ranges)


# ------------------------------------------------------------------------------------------------- what a source says


@dataclass(frozen=True)
class _Asked:
    """One line's wish: ``untold`` is what it installs from where that does not tell the release."""

    name: str
    specifier: str
    where: str
    untold: str = ""


@dataclass
class _Contents:
    """What a requirements file or a pyproject.toml asks for, always or with an extra or a group."""

    names: tuple[str, ...]
    always: list[_Asked] = field(default_factory=list)
    optional: dict[str, list[_Asked]] = field(default_factory=dict)
    constraints: list[_Asked] = field(default_factory=list)
    overrides: list[_Asked] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def stand(self, name: str, source: str) -> Stand:
        """What all of it together says about one distribution."""
        always = _of(self.always, name)
        # Without its extras a project is installed, too: what it always asks for holds all that they can ask for.
        ways = {"": always} if always else {label: _of(items, name) for label, items in self.optional.items()}
        ways = {label: items for label, items in ways.items() if items}
        limits = _of(self.constraints, name)
        if overrides := _of(self.overrides, name):
            ways, limits = dict.fromkeys(ways, overrides), overrides if not ways else []
        absence = "" if ways else f"not named in {source}"
        told = {label: [*items, *limits] for label, items in (ways or {"": []}).items()}
        untold = [f"{item.untold} ({item.where})" for items in told.values() for item in items if item.untold]
        if untold:
            return Stand(distribution=name, untold=untold[0], absence=absence)
        ranges: dict[str, None] = {}
        for items in told.values():
            text = _tidy(*(item.specifier for item in items))
            if not admitted((text,)):
                where = ", ".join(dict.fromkeys(item.where for item in items))
                raise Gemma4CompatError(f"no release of {name} can be {text} ({where}): change one of these bounds")
            ranges[text] = None
        return Stand(
            distribution=name,
            ranges=tuple(ranges),
            absence=absence,
            origin=", ".join(filter(None, ways)),
        )

    def asked(self, text: str, where: str, *, extra: str = "") -> list[_Asked]:
        """One requirement (PEP 508, or a path or URL as pip takes them); nothing when it is not about ``names``."""
        archive = re.search(r"\.(whl|zip|tar\.[a-z0-9]+)$", text.partition(" ")[0])
        try:
            requirement = None if archive and " @ " not in text else Requirement(text)
        except (ValueError, SyntaxError) as error:  # packaging 22 evaluates strings; InvalidRequirement is the former
            if not re.match(r"[./~\\]|[A-Za-z]:\\|[A-Za-z0-9+]+://|file:|[^\s=<>~!;@]+[/\\]", text):
                hint = (
                    "write it as 'transformers>=5.5', with an operator, a comma between bounds, and ; before a marker"
                )
                raise Gemma4CompatError(f"{where}: {text!r} is not a requirement; {hint}") from error
            requirement = None
        if requirement is None:
            location, *marker = re.split(r"\s*;\s", text, maxsplit=1)
            return self._located(location, _parsed(marker[0], where) if marker else None, where, extra)
        name = canonicalize_name(requirement.name)
        if name not in self.names or not self._holds(requirement.marker, name, where, extra):
            return []
        if requirement.url:
            version = _in_file_name(requirement.url)[1]
            return [_Asked(name, f"=={version}" if version else "", where, "" if version else requirement.url)]
        for clause in requirement.specifier:
            if clause.operator == "===" and not _is_version(clause.version):
                return [_Asked(name, "", where, text)]
        return [_Asked(name, str(requirement.specifier), where)]

    def _located(self, location: str, marker: Marker | None, where: str, extra: str) -> list[_Asked]:
        """A path or URL without a name before it."""
        name, version = _in_file_name(location)
        remote = "://" in location
        if name is None:
            egg = re.search(r"[#&]egg=([A-Za-z0-9._-]+)", location)
            parts = re.split(r"[/\\]", re.split(r"[?#]", location)[0].rstrip("/\\"))
            parts = [canonicalize_name(re.sub(r"(\.git)?(@.*)?(\[.*\])?$", "", part)) for part in parts]
            named = [canonicalize_name(egg[1])] if egg else parts if remote else parts[-1:]
            name = next((part for part in named if part in self.names), None)
            if name is None and not remote:
                self.notes.append(f"{where}: what {location} requires is not looked into; ask about its own file, too")
        if name not in self.names or not self._holds(marker, name, where, extra):
            return []
        return [_Asked(name, f"=={version}" if version else "", where, "" if version else location)]

    def _holds(self, marker: Marker | None, name: str, where: str, extra: str = "") -> bool:
        if marker is None or _evaluated(marker, where, extra):
            return True
        self.notes.append(f"{where}: {name} is left out, its marker is false here: {marker}")
        return False


def _of(items: Iterable[_Asked], name: str) -> list[_Asked]:
    return [item for item in items if item.name == name]


def _in_file_name(location: str) -> tuple[str | None, str | None]:
    """Name and release that the file name of a wheel or an sdist tells."""
    last = re.split(r"[/\\]", unquote(re.split(r"[?#]", location)[0]))[-1]
    try:
        if last.endswith(".whl"):
            name, version, *_ = parse_wheel_filename(last)
        elif last.endswith((".tar.gz", ".zip")):
            name, version = parse_sdist_filename(last)
        else:
            return None, None
    except (InvalidWheelFilename, InvalidSdistFilename):
        return None, None
    return str(name), str(version)


def _is_version(text: str) -> bool:
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def _parsed(text: str, where: str) -> Marker:
    try:
        return Marker(text)
    except (ValueError, SyntaxError) as error:
        remedy = "pip install -U packaging" if re.search("extras|dependency_groups", text) else "correct it"
        raise Gemma4CompatError(f"{where}: the marker {text!r} cannot be read; {remedy}") from error


def _evaluated(marker: Marker, where: str, extra: str = "", lock: Mapping[str, Any] | None = None) -> bool:
    try:
        if lock and re.search(r"\b(extras|dependency_groups)\b", str(marker)):  # known to packaging 25 and newer only
            return marker.evaluate(dict(lock), context="lock_file")
        return marker.evaluate({"extra": extra})
    except ValueError as error:  # undefined comparisons, and in packaging 22 invalid versions
        raise Gemma4CompatError(f"{where}: the marker {str(marker)!r} has no answer: {error}; correct it") from error


def _installed(name: str) -> Stand:
    version = _versions.installed(name)
    versions = [] if version is None else [version]
    return _known(name, versions, "not installed")


def _known(name: str, versions: Iterable[str], absence: str) -> Stand:
    """A distribution that can only be one of these (what is no version is what it is installed from)."""
    versions = list(dict.fromkeys(versions))
    if not versions:
        return Stand(distribution=name, absence=absence)
    untold = [version for version in versions if not _is_version(version)]
    if untold:
        return Stand(distribution=name, untold=untold[0])
    return Stand(distribution=name, ranges=tuple(f"=={version}" for version in versions))


# ------------------------------------------------------------------------------------------------------------ formats

_Reader = Callable[[Path, "tuple[str, ...]"], "tuple[list[str], list[Stand]]"]


def _reader(path: Path) -> _Reader:
    if path.name == "pyproject.toml":
        return _pyproject
    if re.fullmatch(r"pylock(\.[^.]+)?\.toml", path.name):
        return _pylock
    if path.name == "uv.lock":
        return _uv_lock
    if path.suffix in (".txt", ".in"):
        return _requirements
    raise Gemma4CompatError(f"{path}: what this is must be told by its name: {ACCEPTED}")


def _text(path: Path, asked_by: str = "") -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        where = f"{asked_by}: " if asked_by else ""
        raise Gemma4CompatError(f"{where}{path} cannot be read ({error.strerror}); name an existing file") from error
    try:
        # PowerShell writes `pip freeze > requirements.txt` as UTF-16, and pip reads it.
        return data.decode("utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise Gemma4CompatError(f"{path} is not UTF-8 text ({error.reason}); save it as UTF-8") from error


# requirements.txt: https://pip.pypa.io/en/stable/reference/requirements-file-format/

# Where packages come from, and how they are built: no influence on which release is admitted, with one exception that
# changes no answer (--pre: nothing here is affected in a pre-release and not in the release).
_IGNORED = frozenset(
    {"-i", "--index-url", "--pypi-url", "--extra-index-url", "--no-index", "-f", "--find-links", "--trusted-host"}
    | {"--no-binary", "--only-binary", "--prefer-binary", "--require-hashes", "--use-feature"}
    | {"--pre", "--all-releases", "--only-final"}
)


def _requirements(path: Path, names: tuple[str, ...]) -> tuple[list[str], list[Stand]]:
    contents = _Contents(names)
    _read_requirements(path, contents, contents.always, ())
    return contents.notes, [contents.stand(name, path.name) for name in names]


def _read_requirements(
    path: Path, contents: _Contents, into: list[_Asked], within: tuple[Path, ...], asked_by: str = ""
) -> None:
    if path.resolve() in within:
        raise Gemma4CompatError(f"{asked_by}: {path} includes itself; remove one of the two lines")
    for number, line in _lines(_text(path, asked_by)):
        where = f"{path} line {number}"
        option, argument = _option(line)
        if option in ("-r", "--requirement", "-c", "--constraint"):
            if re.match("(https?|file)://", argument):
                contents.notes.append(f"{where}: {argument} is not read; ask about a copy of it")
                continue
            inner = contents.constraints if option in ("-c", "--constraint") else contents.always
            _read_requirements(path.parent / argument, contents, inner, (*within, path.resolve()), where)
        elif option in ("-e", "--editable"):
            # One that is named can be asked about like any other; what it is installed from tells no release.
            into.extend(contents.asked(argument, where))
        elif option is None:
            into.extend(contents.asked(re.split(r"\s--?[A-Za-z]", line)[0].strip(), where))
        elif option not in _IGNORED:
            contents.notes.append(f"{where}: the option {option} is not understood and ignored")


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Logical lines without comments, with the number of their first line, variables filled in."""
    whole, first = "", 0
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        first = first if whole else number
        comment = re.match(r"\s*#", line)
        if line.endswith("\\") and not comment:
            whole += line[:-1]
            continue
        bare = re.sub(r"(^|\s+)#.*$", "", f"{whole} {line}" if comment else whole + line)
        filled = re.sub(r"\$\{([A-Z0-9_]+)\}", lambda found: os.environ.get(found[1], found[0]), bare).strip()
        if filled:
            yield first, filled
        whole = ""


def _option(line: str) -> tuple[str | None, str]:
    """``-r base.txt``, ``-rbase.txt``, ``--requirement=base.txt`` as (option, argument); (None, line) for others."""
    found = re.fullmatch(r"(--[A-Za-z0-9-]+|-[A-Za-z])(?:\s*=\s*|\s+|(?<=^-[A-Za-z])|$)(.*)", line)
    return (found[1], re.sub(r"""^(["'])(.*)\1$""", r"\2", found[2].strip())) if found else (None, line)


# pyproject.toml: https://packaging.python.org/en/latest/specifications/pyproject-toml/ and .../dependency-groups/


def _pyproject(path: Path, names: tuple[str, ...]) -> tuple[list[str], list[Stand]]:
    data = _toml(path)
    project, groups = _table(data, "project", path), _table(data, "dependency-groups", path)
    uv = _table(_table(data, "tool", path), "uv", path)
    if not project and not groups:
        raise Gemma4CompatError(
            f"{path} has neither [project] nor [dependency-groups]; export what it asks for as requirements.txt"
        )
    contents = _Contents(names)

    def read(table: Mapping[str, Any], key: str, label: str, extra: str = "") -> list[_Asked]:
        where = f"{path} {label}"
        return [item for text in _strings(table, key, where) for item in contents.asked(text, where, extra=extra)]

    contents.always = read(project, "dependencies", "project.dependencies")
    extras = _table(project, "optional-dependencies", path)
    for extra in extras:
        # An extra that asks for the project's other extras adds nothing: each of them counts by itself.
        label = f"extra {extra}"
        contents.optional[label] = read(extras, extra, label, canonicalize_name(extra))
    for group in groups:
        label = f"group {group}"
        requirements = _group(groups, group, path, ())
        contents.optional[label] = [item for text in requirements for item in contents.asked(text, f"{path} {label}")]
    contents.optional["group dev"] = [
        *contents.optional.get("group dev", ()),
        *read(uv, "dev-dependencies", "tool.uv.dev-dependencies"),
    ]
    contents.constraints = read(uv, "constraint-dependencies", "tool.uv.constraint-dependencies")
    contents.overrides = read(uv, "override-dependencies", "tool.uv.override-dependencies")
    for name, source in _table(uv, "sources", path).items():
        for entry in source if isinstance(source, list) else [source]:
            kinds = {"git", "url", "path", "workspace"} & set(entry if isinstance(entry, dict) else ())
            if kinds and canonicalize_name(name) in names:
                told = f"{min(kinds)} {entry[min(kinds)]}"
                # Uv takes it from there wherever it is asked for.
                item = _Asked(canonicalize_name(name), "", f"{path} tool.uv.sources", told)
                asked = [*contents.always, *(one for items in contents.optional.values() for one in items)]
                if _of(asked, item.name):
                    contents.always.append(item)
    dynamic = {"dependencies", "optional-dependencies"} & set(_strings(project, "dynamic", f"{path} project.dynamic"))
    contents.notes += [
        f"{path}: {key} are dynamic and not read; ask about the file that they come from" for key in sorted(dynamic)
    ]
    return list(dict.fromkeys(contents.notes)), [contents.stand(name, path.name) for name in names]


def _group(groups: Mapping[str, Any], name: str, path: Path, within: tuple[str, ...]) -> list[str]:
    """The requirements of a dependency group and of those it includes (PEP 735)."""
    wanted = canonicalize_name(name)
    found = [group for group in groups if canonicalize_name(group) == wanted]
    if not found or wanted in within:
        problem = "includes itself" if wanted in within else "is not defined"
        raise Gemma4CompatError(f"{path}: the dependency group {name!r} {problem}; correct its include-group")
    requirements: list[str] = []
    for item in _list(groups, found[0], f"{path} dependency-groups.{found[0]}"):
        if isinstance(item, str):
            requirements.append(item)
        elif isinstance(item, dict) and isinstance(item.get("include-group"), str):
            requirements += _group(groups, item["include-group"], path, (*within, wanted))
        else:
            raise Gemma4CompatError(
                f"{path} dependency-groups.{found[0]}: {item!r} is neither a requirement nor an include-group"
            )
    return requirements


# pylock.toml: https://packaging.python.org/en/latest/specifications/pylock-toml/


def _pylock(path: Path, names: tuple[str, ...]) -> tuple[list[str], list[Stand]]:
    data = _toml(path)
    _supported(path, "lock-version", data.get("lock-version"), str(data.get("lock-version")).partition(".")[0] == "1")
    contents = _Contents(names)
    everything = {
        "extras": frozenset(_strings(data, "extras", str(path))),
        "dependency_groups": frozenset(_strings(data, "dependency-groups", str(path))),
    }

    def holds(text: Any, where: str) -> bool:
        return _evaluated(_parsed(str(text), where), where, lock=everything)

    environments = _strings(data, "environments", str(path))
    if environments and not any(holds(text, f"{path} environments") for text in environments):
        contents.notes.append(f"{path} was locked for other environments than this one: {' or '.join(environments)}")
    versions: dict[str, list[str]] = {name: [] for name in names}
    for name, package in _packages(data, "packages", path):
        if name in versions:
            where = f"{path} packages.{name}"
            if "marker" in package and not holds(package["marker"], where):
                contents.notes.append(f"{where} is left out, its marker is false here: {package['marker']}")
            else:
                versions[name].append(_version(package, where))
    return contents.notes, _locked(path, versions)


# uv.lock: https://docs.astral.sh/uv/concepts/projects/layout/#the-lockfile (it has no specification)


def _uv_lock(path: Path, names: tuple[str, ...]) -> tuple[list[str], list[Stand]]:
    data = _toml(path)
    _supported(path, "version", data.get("version"), data.get("version") == 1)
    versions: dict[str, list[str]] = {name: [] for name in names}
    for name, package in _packages(data, "package", path):
        if name in versions:
            versions[name].append(_version(package, f"{path} package.{name}"))
    return [], _locked(path, versions)


def _supported(path: Path, key: str, value: Any, supported: bool) -> None:
    if not supported:
        said = f"has {key} {value!r}" if value is not None else f"has no {key}"
        raise Gemma4CompatError(f"{path} {said}; this reads version 1: lock again, or upgrade gemma4_compat")


def _locked(path: Path, versions: Mapping[str, list[str]]) -> list[Stand]:
    return [_known(name, found, f"not in {path.name}") for name, found in versions.items()]


def _packages(data: Mapping[str, Any], key: str, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for package in _list(data, key, str(path)):
        if not isinstance(package, dict) or not isinstance(package.get("name"), str):
            raise Gemma4CompatError(f"{path}: a package without a name in [[{key}]]; lock again")
        yield canonicalize_name(package["name"]), package


def _version(package: Mapping[str, Any], where: str) -> str:
    """The locked version; without one, what the package is installed from."""
    version = package.get("version")
    if isinstance(version, str):
        return version
    if version is not None:
        raise Gemma4CompatError(f"{where}: the version {version!r} is not text; lock again")
    for kind in ("vcs", "directory", "archive", "source"):
        for value in package[kind].values() if isinstance(package.get(kind), dict) else ():
            if isinstance(value, str):
                return f"{kind} {value} ({where})"
    return f"an entry without a version ({where})"


# TOML, with messages instead of tracebacks


def _toml(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        data: dict[str, Any] = tomllib.loads(_text(path))
    except tomllib.TOMLDecodeError as error:
        raise Gemma4CompatError(f"{path} is not valid TOML: {error}; correct it there") from error
    return data


def _table(data: Mapping[str, Any], key: str, path: Path) -> dict[str, Any]:
    value = data.get(key, {})
    if not isinstance(value, dict):
        raise Gemma4CompatError(f"{path}: {key} is {value!r}; it must be a table")
    return value


def _list(data: Mapping[str, Any], key: str, where: str) -> list[Any]:
    value = data.get(key, [])
    if not isinstance(value, list):
        raise Gemma4CompatError(f"{where}: {key} is {value!r}; it must be a list")
    return value


def _strings(data: Mapping[str, Any], key: str, where: str) -> list[str]:
    value = _list(data, key, where)
    wrong = [item for item in value if not isinstance(item, str)]
    if wrong:
        raise Gemma4CompatError(f"{where}: {wrong[0]!r} in {key} is not text; put it in quotes")
    return value
