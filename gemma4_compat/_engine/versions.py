"""Which release is installed, which is loaded, and whether a specifier admits it.

All imports are at the top: the engine calls this under its lock, inside import hooks, and an import there could wait
for a thread that waits for the lock.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

# The import name of a distribution, if the two differ. (No library that is repaired here needs an entry.)
_IMPORT_NAMES: dict[str, str] = {}
# The oldest releases this package supports and is measured on. The extra `stack` asks for the same.
OLDEST = MappingProxyType(
    {"transformers": "5.5.0", "accelerate": "1.12.0", "peft": "0.18.0", "bitsandbytes": "0.48.2"}
)
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*(.*)")


def installed(distribution: str) -> str | None:
    """The version that ``import`` would find now, from the metadata on ``sys.path``; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except (metadata.PackageNotFoundError, ValueError, KeyError):  # absent, not text, or without a version
        return None


def copies(distribution: str) -> dict[str, str]:
    """Every copy of a distribution on ``sys.path``: folder -> version, in the order Python would search."""
    found: dict[str, str] = {}
    for item in metadata.distributions(name=distribution):
        with contextlib.suppress(ValueError, KeyError):  # metadata that cannot be read
            found.setdefault(str(Path(str(item.locate_file(""))).resolve()), item.version)
    return found


def loaded(distribution: str) -> str | None:
    """``__version__`` of the imported package; None if it is not imported or has none."""
    module = sys.modules.get(_import_name(distribution))
    version = getattr(module, "__dict__", {}).get("__version__")
    return version if isinstance(version, str) else None


def is_loaded(distribution: str) -> bool:
    """Whether the package is in sys.modules, with or without a version."""
    return _import_name(distribution) in sys.modules


def current(distribution: str) -> str | None:
    """The version that counts: the loaded version, else the installed one."""
    return loaded(distribution) or installed(distribution)


def admits(specifier: str, version: str) -> bool:
    """Whether ``version`` is inside ``specifier``. Pre-releases count like any other release.

    ``prereleases=True`` is always passed: packaging 25 and 26 have different defaults.
    """
    try:
        return _specifier(specifier).contains(version, prereleases=True)
    except InvalidVersion:  # packaging before 26
        return False


def newer(version: str, than: str) -> bool:
    """Whether ``version`` is a later release than ``than``. A local build (``+cpu``) of a release is that release."""
    return Version(Version(version).public) > Version(than)


def too_old(distribution: str, version: str, oldest: Mapping[str, str] = OLDEST) -> str | None:
    """Why a release is not supported, with the remedy, in one sentence; None if it is supported.

    A pre-release of the oldest supported release is older. A string that is not a version is not judged.
    """
    floor = oldest.get(distribution)
    try:
        if floor is None or Version(version) >= Version(floor):
            return None
    except InvalidVersion:
        return None
    return (
        f"{distribution} {version} is older than the oldest supported release {floor}; "
        f"upgrade: pip install '{distribution}>={floor}'"
    )


def differ(first: str, second: str) -> bool:
    """Whether two version strings name different releases. Local parts (``+cpu``) and invalid strings do not count."""
    try:
        return Version(Version(first).public) != Version(Version(second).public)
    except InvalidVersion:
        return False


def requirement(text: str) -> tuple[str, str]:
    """One of the registry's own requirement strings as (distribution, specifier).

    They hold only a name and a specifier. (A contract test reads them with packaging's parser, whose import costs more
    than all of this.)
    """
    name, specifier = _REQUIREMENT.fullmatch(text).groups()  # type: ignore[union-attr]
    return name, specifier


def span_text(releases: Iterable[str], ordered: Sequence[str]) -> str:
    """Releases as text, neighbours in ``ordered`` as one: ``"5.5.0 - 5.14.1, 5.16.0"``."""
    places = sorted(ordered.index(release) for release in releases)
    spans: list[list[int]] = []
    for place in places:
        if spans and spans[-1][1] == place - 1:
            spans[-1][1] = place
        else:
            spans.append([place, place])
    return ", ".join(
        ordered[first] if first == last else f"{ordered[first]} - {ordered[last]}" for first, last in spans
    )


def in_spans(text: str, ordered: Sequence[str]) -> list[str]:
    """The releases from which :func:`span_text` made ``text``."""
    found: list[str] = []
    for span in text.split(", "):
        first, _, last = span.partition(" - ")
        found += ordered[ordered.index(first) : ordered.index(last or first) + 1]
    return found


def _import_name(distribution: str) -> str:
    return _IMPORT_NAMES.get(distribution, distribution.replace("-", "_"))


@functools.cache
def _specifier(text: str) -> SpecifierSet:
    return SpecifierSet(text)
