"""Which release is installed, which is loaded, and whether a specifier admits it."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

# The import name of a distribution, where the two differ. (None of the libraries repaired here needs an entry.)
_IMPORT_NAMES: dict[str, str] = {}


def installed(distribution: str) -> str | None:
    """The version that ``import`` would find now, from the metadata on ``sys.path``; None when absent."""
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def copies(distribution: str) -> dict[str, str]:
    """Every copy of a distribution on ``sys.path``: folder -> version, in the order Python would search."""
    from importlib import metadata

    found: dict[str, str] = {}
    for item in metadata.distributions(name=distribution):
        found.setdefault(str(Path(str(item.locate_file(""))).resolve()), item.version)
    return found


def loaded(distribution: str) -> str | None:
    """``__version__`` of the imported package; None when it is not imported or does not say."""
    module = sys.modules.get(_IMPORT_NAMES.get(distribution, distribution.replace("-", "_")))
    version = vars(module).get("__version__") if module is not None else None
    return version if isinstance(version, str) else None


def current(distribution: str) -> str | None:
    """The version that counts: the loaded one, else the installed one."""
    return loaded(distribution) or installed(distribution)


def admits(specifier: str, version: str) -> bool:
    """Whether ``version`` is inside ``specifier``. Pre-releases count like any other release.

    ``prereleases=True`` is passed always: packaging 25 and 26 disagree about the default.
    """
    return _specifier(specifier).contains(version, prereleases=True)  # type: ignore[no-any-return, attr-defined]


def newer(version: str, than: str) -> bool:
    """Whether ``version`` is a later release than ``than``."""
    from packaging.version import Version

    return Version(version) > Version(than)


def differ(first: str, second: str) -> bool:
    """Whether two version strings name two releases. Local parts (``+cpu``) and unparsable strings do not count."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(first).public != Version(second).public
    except InvalidVersion:
        return False


def requirement(text: str) -> tuple[str, str]:
    """A requirement string as (distribution, specifier)."""
    from packaging.requirements import Requirement

    parsed = Requirement(text)
    return parsed.name, str(parsed.specifier)


@functools.cache
def _specifier(text: str) -> object:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(text)
