"""The files that state releases: requirements files, pyproject.toml, pylock.toml and uv.lock.

``packaging.pylock`` and ``packaging.dependency_groups`` read two of these formats; the oldest supported packaging (22)
has neither, so the code below would remain as their fallback.
"""

from __future__ import annotations

import codecs
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._needed import requested, state
from gemma4_compat._needed.requested import Request, Requests
from gemma4_compat._needed.state import DistributionState

ACCEPTED = "requirements.txt (or any .txt or .in), pyproject.toml, pylock.toml, pylock.NAME.toml or uv.lock"

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
    try:
        data = path.read_bytes()
    except OSError as error:
        where = f"{included_by}: " if included_by else ""
        raise Gemma4CompatError(f"{where}{path} cannot be read ({error.strerror}); name an existing file") from error
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
    _read_requirements(path, requests, requests.always, ())
    return requests.notes, [requests.state(name, path.name) for name in names]


def _read_requirements(
    path: Path, requests: Requests, into: list[Request], within: tuple[Path, ...], included_by: str = ""
) -> None:
    if path.resolve() in within:
        raise Gemma4CompatError(f"{included_by}: {path} includes itself; remove one of the two lines")
    for number, line in _lines(_text(path, included_by)):
        where = f"{path} line {number}"
        option, argument = _option(line)
        if option in ("-r", "--requirement", "-c", "--constraint"):
            if re.match("(https?|file)://", argument):
                requests.notes.append(
                    f"{where}: {requested.without_credentials(argument)} is not read; ask about a copy of it"
                )
                continue
            inner = requests.constraints if option in ("-c", "--constraint") else requests.always
            _read_requirements(path.parent / argument, requests, inner, (*within, path.resolve()), where)
        elif option in ("-e", "--editable"):
            # One that is named can be asked about like any other; what it is installed from tells no release.
            into.extend(requests.parse(argument, where))
        elif option is None:
            into.extend(requests.parse(re.split(r"\s--?[A-Za-z]", line)[0].strip(), where))
        elif option not in _IGNORED:
            requests.notes.append(f"{where}: the option {option} is not understood and ignored")


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


def _pyproject(path: Path, names: tuple[str, ...]) -> tuple[list[str], list[DistributionState]]:
    data = _toml(path)
    project, groups = _table(data, "project", path), _table(data, "dependency-groups", path)
    uv = _table(_table(data, "tool", path), "uv", path)
    if not project and not groups:
        raise Gemma4CompatError(
            f"{path} has neither [project] nor [dependency-groups]; export what it asks for as requirements.txt"
        )
    requests = Requests(names)

    def read(table: Mapping[str, Any], key: str, label: str, extra: str = "") -> list[Request]:
        where = f"{path} {label}"
        return [item for text in _strings(table, key, where) for item in requests.parse(text, where, extra=extra)]

    requests.always = read(project, "dependencies", "project.dependencies")
    extras = _table(project, "optional-dependencies", path)
    for extra in extras:
        # An extra that asks for the project's other extras adds nothing: each of them counts by itself.
        label = f"extra {extra}"
        requests.optional[label] = read(extras, extra, label, canonicalize_name(extra))
    for group in groups:
        label = f"group {group}"
        requirements = _group(groups, group, path, ())
        requests.optional[label] = [item for text in requirements for item in requests.parse(text, f"{path} {label}")]
    requests.optional["group dev"] = [
        *requests.optional.get("group dev", ()),
        *read(uv, "dev-dependencies", "tool.uv.dev-dependencies"),
    ]
    requests.constraints = read(uv, "constraint-dependencies", "tool.uv.constraint-dependencies")
    requests.overrides = read(uv, "override-dependencies", "tool.uv.override-dependencies")
    for name, source in _table(uv, "sources", path).items():
        for entry in source if isinstance(source, list) else [source]:
            kinds = {"git", "url", "path", "workspace"} & set(entry if isinstance(entry, dict) else ())
            if kinds and canonicalize_name(name) in names:
                location = f"{min(kinds)} {entry[min(kinds)]}"
                # Uv takes it from there wherever it is asked for.
                item = Request(canonicalize_name(name), "", f"{path} tool.uv.sources", location)
                everywhere = [*requests.always, *(one for items in requests.optional.values() for one in items)]
                if requested.about(item.name, everywhere):
                    requests.always.append(item)
    dynamic = {"dependencies", "optional-dependencies"} & set(_strings(project, "dynamic", f"{path} project.dynamic"))
    requests.notes += [
        f"{path}: {key} are dynamic and not read; ask about the file that they come from" for key in sorted(dynamic)
    ]
    return list(dict.fromkeys(requests.notes)), [requests.state(name, path.name) for name in names]


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


def _pylock(path: Path, names: tuple[str, ...]) -> tuple[list[str], list[DistributionState]]:
    data = _toml(path)
    _supported(path, "lock-version", data.get("lock-version"), str(data.get("lock-version")).partition(".")[0] == "1")
    notes: list[str] = []
    everything = {
        "extras": frozenset(_strings(data, "extras", str(path))),
        "dependency_groups": frozenset(_strings(data, "dependency-groups", str(path))),
    }

    def holds(text: Any, where: str) -> bool:
        return requested.evaluate(requested.parse_marker(str(text), where), where, lock=everything)

    environments = _strings(data, "environments", str(path))
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


def _locked(path: Path, versions: Mapping[str, list[str]]) -> list[DistributionState]:
    return [state.one_of(name, found, f"not in {path.name}") for name, found in versions.items()]


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
