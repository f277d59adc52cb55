"""The files that state releases: requirements files, pyproject.toml, pylock.toml and uv.lock.

``packaging.dependency_groups`` (26.1) makes two million requirements of 21 groups that include each other twice, and
its errors show lines that may hold a secret; ``packaging.pylock`` refuses locks that are not complete.
"""

from __future__ import annotations

import codecs
import os
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from gemma4_compat._engine.io import toml
from gemma4_compat._engine.io.files import MIB, read_bytes
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._needed import ranges, requested, state
from gemma4_compat._needed.requested import Request, Requests
from gemma4_compat._needed.state import DistributionState

ACCEPTED = "requirements.txt (or any .txt or .in), pyproject.toml, pylock.toml, pylock.NAME.toml or uv.lock"

#: Bytes of a file: Airflow's uv.lock, of 800 packages and more, has 3.3 MB.
LARGEST = 8 * MIB
#: Requirements files or dependency groups inside each other, and files in all.
DEEPEST, MOST_FILES = 50, 1000
#: Characters of a line with the ones that continue it: a requirement has 85 for each of its hashes.
LONGEST_LINE = 500_000
#: Environment variables in a line.
MOST_VARIABLES = 50
#: Requirements of all dependency groups, each group with those that it includes.
MOST_REQUIREMENTS = 50_000
#: Releases of one distribution in a lock file: one for each environment that needs another.
MOST_RELEASES = 50

_Reader = Callable[[Path, "tuple[str, ...]"], "tuple[list[str], list[DistributionState]]"]


def read(path: Path, names: tuple[str, ...]) -> tuple[list[str], list[DistributionState]]:
    """Read what a file states about the distributions ``names``: notes for the user, and a state for each.

    Raises:
        Gemma4CompatError: the file cannot be understood. The message names file, line and remedy.
    """
    return _reader(path)(path, names)


def _reader(path: Path) -> _Reader:
    if path.name == "pyproject.toml":
        return _pyproject
    if re.fullmatch(r"pylock(\.[^.]+)?\.toml", path.name):
        return _pylock
    if path.name == "uv.lock":
        return _uv_lock
    if path.suffix in (".txt", ".in"):
        return _requirements
    raise Gemma4CompatError(f"{path}: the name must tell what this is: {ACCEPTED}")


def _text(path: Path, included_by: str = "") -> str:
    what, remedy = "a file that states releases", "; name an existing file"
    data = read_bytes(path, LARGEST, what, included_by=included_by, remedy=remedy)
    try:
        # PowerShell writes `pip freeze > requirements.txt` as UTF-16, and pip reads it.
        return data.decode("utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise Gemma4CompatError(f"{path} is not UTF-8 text ({error.reason}); save it as UTF-8") from error


# requirements.txt: https://pip.pypa.io/en/stable/reference/requirements-file-format/

# Where packages come from, and how they are built: no influence on which release is admitted, with one exception that
# changes no verdict (--pre: nothing here is affected in a pre-release and not in the release).
_IGNORED = frozenset(
    {"-i", "--index-url", "--pypi-url", "--extra-index-url", "--no-index", "-f", "--find-links", "--trusted-host"}
    | {"--no-binary", "--only-binary", "--prefer-binary", "--require-hashes", "--use-feature"}
    | {"--pre", "--all-releases", "--only-final"}
)


def _requirements(path: Path, names: tuple[str, ...]) -> tuple[list[str], list[DistributionState]]:
    requests = Requests(names)
    _read_requirements(path, requests, requests.always, (), set())
    return list(dict.fromkeys(requests.notes)), [requests.state(name, path.name) for name in names]


def _read_requirements(
    path: Path,
    requests: Requests,
    into: list[Request],
    within: tuple[Path, ...],
    known: set[tuple[Path, int]],
    included_by: str = "",
) -> None:
    """Read a file and those that it includes.

    Args:
        path: of the file.
        requests: where notes go, and requests of a file that is included as another kind.
        into: where the requests go.
        within: the files that include this one, the outermost first.
        known: the files that were read, and into what: once is enough.
        included_by: the line that includes it.
    """
    text = _text(path, included_by)
    here = path.resolve()
    if here in within:
        raise Gemma4CompatError(f"{included_by}: {path} includes itself; remove one of the two lines")
    if (here, id(into)) in known:
        return
    known.add((here, id(into)))
    if len(within) >= DEEPEST or len(known) > MOST_FILES:
        raise Gemma4CompatError(
            f"{included_by}: requirements files are read {DEEPEST} inside each other and {MOST_FILES} in "
            "all; join some"
        )
    for number, line in _lines(text, path):
        where = f"{path} line {number}"
        option, argument = _option(line)
        if option in ("-r", "--requirement", "-c", "--constraint"):
            if re.match("(https?|file)://", argument):
                requests.notes.append(
                    f"{where}: {requested.without_credentials(argument)} is not read; ask about a copy of it"
                )
                continue
            inner = requests.constraints if option in ("-c", "--constraint") else requests.always
            _read_requirements(path.parent / argument, requests, inner, (*within, here), known, where)
        elif option in ("-e", "--editable"):
            # One that is named can be asked about like any other; what it is installed from tells no release.
            into.extend(requests.parse(argument, where))
        elif option is None:
            into.extend(requests.parse(re.split(r"\s--?[A-Za-z]", line, maxsplit=1)[0].strip(), where))
        elif option not in _IGNORED:
            requests.notes.append(f"{where}: the option {option} is not understood and ignored")


def _lines(text: str, path: Path) -> Iterator[tuple[int, str]]:
    """Logical lines without comments, with the number of their first line, variables filled in."""
    parts: list[str] = []
    length = first = 0
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        first = first if parts else number
        comment = re.match(r"\s*#", line)
        length += len(line)
        if length > LONGEST_LINE:
            raise Gemma4CompatError(
                f"{path} line {first}: a line of more than {LONGEST_LINE} characters; split it, or name another file"
            )
        if line.endswith("\\") and not comment:
            parts.append(line[:-1])
            continue
        whole = "".join([*parts, " " if comment and parts else "", line])
        start = re.search(r"(?:^|(?<=\s))#", whole)
        bare = whole[: start.start()] if start else whole
        if filled := _filled(bare, f"{path} line {first}").strip():
            yield first, filled
        parts, length = [], 0


def _filled(line: str, where: str) -> str:
    """A line with the values of the environment variables that it names."""
    if line.count("${") > MOST_VARIABLES:
        raise Gemma4CompatError(f"{where}: more than {MOST_VARIABLES} variables in a line; write out what they hold")
    return re.sub(r"\$\{([A-Z0-9_]+)\}", lambda found: os.environ.get(found[1], found[0]), line)


def _option(line: str) -> tuple[str | None, str]:
    """``-r base.txt``, ``-rbase.txt``, ``--requirement=base.txt`` as (option, argument); (None, line) for others."""
    found = re.fullmatch(r"(--[A-Za-z0-9-]+|-[A-Za-z])(?:\s*=\s*|\s+|(?<=^-[A-Za-z])|$)(.*)", line)
    return (found[1], re.sub(r"""^(["'])(.*)\1$""", r"\2", found[2].strip())) if found else (None, line)


# pyproject.toml: https://packaging.python.org/en/latest/specifications/pyproject-toml/ and .../dependency-groups/


def _pyproject(path: Path, names: tuple[str, ...]) -> tuple[list[str], list[DistributionState]]:
    data = toml.parse(_text(path), path)
    project, groups = toml.table(data, "project", path), toml.table(data, "dependency-groups", path)
    uv = toml.table(toml.table(data, "tool", path), "uv", path)
    if not project and not groups:
        raise Gemma4CompatError(
            f"{path} has neither [project] nor [dependency-groups]; export what it asks for as requirements.txt"
        )
    requests = Requests(names)

    def read(table: Mapping[str, Any], key: str, label: str, extra: str = "") -> list[Request]:
        where = f"{path} {label}"
        return [item for text in toml.strings(table, key, where) for item in requests.parse(text, where, extra=extra)]

    requests.always = read(project, "dependencies", "project.dependencies")
    extras = toml.table(project, "optional-dependencies", path)
    for extra in extras:
        # An extra that asks for the project's other extras adds nothing: each of them counts by itself.
        label = f"extra {extra}"
        requests.optional[label] = read(extras, extra, label, canonicalize_name(extra))
    for group, requirements in _groups(groups, path).items():
        label = f"group {group}"
        requests.optional[label] = [item for text in requirements for item in requests.parse(text, f"{path} {label}")]
    requests.optional["group dev"] = [
        *requests.optional.get("group dev", ()),
        *read(uv, "dev-dependencies", "tool.uv.dev-dependencies"),
    ]
    requests.constraints = read(uv, "constraint-dependencies", "tool.uv.constraint-dependencies")
    requests.overrides = read(uv, "override-dependencies", "tool.uv.override-dependencies")
    for name, source in toml.table(uv, "sources", path).items():
        for entry in source if isinstance(source, list) else [source]:
            kinds = {"git", "url", "path", "workspace"} & set(entry if isinstance(entry, dict) else ())
            if kinds and canonicalize_name(name) in names:
                location = f"{min(kinds)} {entry[min(kinds)]}"
                # Uv takes it from there wherever it is asked for.
                item = Request(canonicalize_name(name), "", f"{path} tool.uv.sources", location)
                everywhere = [*requests.always, *(one for items in requests.optional.values() for one in items)]
                if requested.about(item.name, everywhere):
                    requests.always.append(item)
    dynamic = {"dependencies", "optional-dependencies"} & set(
        toml.strings(project, "dynamic", f"{path} project.dynamic")
    )
    requests.notes += [
        f"{path}: {key} are dynamic and not read; ask about the file that they come from" for key in sorted(dynamic)
    ]
    return list(dict.fromkeys(requests.notes)), [requests.state(name, path.name) for name in names]


def _groups(groups: Mapping[str, Any], path: Path) -> dict[str, list[str]]:
    """The requirements of each dependency group and of those it includes (PEP 735), each of them once."""
    by_name: dict[str, str] = {}
    for group in groups:
        by_name.setdefault(canonicalize_name(group), group)
    found: dict[str, dict[str, None]] = {}
    total = 0

    def read(name: str, within: tuple[str, ...]) -> dict[str, None]:
        nonlocal total
        wanted = canonicalize_name(name)
        if wanted not in by_name or wanted in within:
            problem = "includes itself" if wanted in within else "is not defined"
            raise Gemma4CompatError(f"{path}: the dependency group {name!r} {problem}; correct its include-group")
        if wanted in found:
            return found[wanted]
        group = by_name[wanted]
        if len(within) >= DEEPEST:
            raise Gemma4CompatError(f"{path}: more than {DEEPEST} dependency groups include each other; join some")
        own: dict[str, None] = {}
        for item in toml.items(groups, group, f"{path} dependency-groups.{group}"):
            if isinstance(item, str):
                own[item] = None
            elif isinstance(item, dict) and isinstance(item.get("include-group"), str):
                own |= read(item["include-group"], (*within, wanted))
            else:
                raise Gemma4CompatError(
                    f"{path} dependency-groups.{group}: {reprlib.repr(item)} is neither a requirement nor an "
                    "include-group"
                )
        found[wanted] = own
        total += len(own)
        if total > MOST_REQUIREMENTS:
            raise Gemma4CompatError(f"{path}: the dependency groups have more than {MOST_REQUIREMENTS} requirements")
        return own

    return {group: list(read(group, ())) for group in groups}


# pylock.toml: https://packaging.python.org/en/latest/specifications/pylock-toml/


def _pylock(path: Path, names: tuple[str, ...]) -> tuple[list[str], list[DistributionState]]:
    data = toml.parse(_text(path), path)
    _supported(path, "lock-version", data.get("lock-version"), str(data.get("lock-version")).partition(".")[0] == "1")
    notes: list[str] = []
    everything = {
        "extras": frozenset(toml.strings(data, "extras", str(path))),
        "dependency_groups": frozenset(toml.strings(data, "dependency-groups", str(path))),
    }

    def holds(text: Any, where: str) -> bool:
        return requested.evaluate(requested.parse_marker(str(text), where), where, lock=everything)

    environments = toml.strings(data, "environments", str(path))
    if environments and not any(holds(text, f"{path} environments") for text in environments):
        notes.append(f"{path} was locked for other environments than this one: {' or '.join(environments)}")
    versions: dict[str, list[str]] = {name: [] for name in names}
    for name, package in _packages(data, "packages", path):
        if name in versions:
            where = f"{path} packages.{name}"
            if "marker" in package and not holds(package["marker"], where):
                notes.append(f"{where} is left out, its marker is false here: {package['marker']}")
            else:
                versions[name].append(_version(package, where))
    return notes, _locked(path, versions)


# uv.lock: https://docs.astral.sh/uv/concepts/projects/layout/#the-lockfile (it has no specification)


def _uv_lock(path: Path, names: tuple[str, ...]) -> tuple[list[str], list[DistributionState]]:
    data = toml.parse(_text(path), path)
    _supported(path, "version", data.get("version"), data.get("version") == 1)
    versions: dict[str, list[str]] = {name: [] for name in names}
    for name, package in _packages(data, "package", path):
        if name in versions:
            versions[name].append(_version(package, f"{path} package.{name}"))
    return [], _locked(path, versions)


def _supported(path: Path, key: str, value: Any, supported: bool) -> None:
    if not supported:
        said = f"has {key} {reprlib.repr(value)}" if value is not None else f"has no {key}"
        raise Gemma4CompatError(f"{path} {said}; this reads version 1: lock again, or upgrade gemma4_compat")


def _locked(path: Path, versions: Mapping[str, list[str]]) -> list[DistributionState]:
    for name, found in versions.items():
        if len(set(found)) > MOST_RELEASES:
            raise Gemma4CompatError(f"{path} locks more than {MOST_RELEASES} releases of {name}; lock again")
    return [state.one_of(name, found, f"not in {path.name}") for name, found in versions.items()]


def _packages(data: Mapping[str, Any], key: str, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for package in toml.items(data, key, str(path)):
        if not isinstance(package, dict) or not isinstance(package.get("name"), str):
            raise Gemma4CompatError(f"{path}: a package without a name in [[{key}]]; lock again")
        yield canonicalize_name(package["name"]), package


def _version(package: Mapping[str, Any], where: str) -> str:
    """The locked version; without one, what the package is installed from."""
    version = package.get("version")
    if isinstance(version, str) and len(version) <= ranges.LONGEST:
        return version
    if version is not None:
        raise Gemma4CompatError(f"{where}: the version {reprlib.repr(version)} is not one; lock again")
    for kind in ("vcs", "directory", "archive", "source"):
        for value in package[kind].values() if isinstance(package.get(kind), dict) else ():
            if isinstance(value, str):
                return f"{kind} {value} ({where})"
    return f"an entry without a version ({where})"
