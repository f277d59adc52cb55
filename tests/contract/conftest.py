"""Children with the real libraries, and what an engine-free reading of the metadata says should happen in them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import gemma4_compat
from gemma4_compat import Patch
from gemma4_compat._engine import versions as _versions
from tests.contract.observation import LIBRARIES, groups_here
from tests.helpers import child

PATCHES = gemma4_compat.patches()
MODULES = list(dict.fromkeys(target.module for patch in PATCHES for target in patch.targets))


@pytest.fixture(scope="session")
def inside() -> Callable[[str], Any]:
    """``inside(scenario)``: what that function of inside.py finds in a child of its own, each run once."""
    missing = [name for name in LIBRARIES if version(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: pip install 'gemma4-compat[test]'")
    known: dict[str, Any] = {}

    def run(scenario: str) -> Any:
        if scenario not in known:
            done = child("-m", "tests.contract.inside", scenario, *MODULES, timeout=900)
            assert done.code == 0, f"the child ended with {done.code}:\n{done.stderr[-4000:]}"
            known[scenario] = done.data
        return known[scenario]

    return run


def version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def modules_here(patch: Patch) -> set[str]:
    """The modules that the installed release has and some group of the patch's targets waits for."""
    here = groups_here(patch)
    return {module for group, modules in patch.groups.items() if group in here for module in modules}


def targets_here(patch: Patch) -> set[str]:
    """The targets that must be replaced in the installed release, if any is."""
    here = groups_here(patch)
    release = str(version(patch.distribution))
    return {
        str(target)
        for target in patch.targets
        if target.group in here
        and not (target.optional or target.activator)
        and (not target.affected or _versions.admits(target.affected, release))
    }


def predicted(patch: Patch, detected: str | None = None, **versions: str | None) -> str:
    """The state that the patch's own metadata and the installed releases (or ``versions``) ask for."""

    def found(name: str) -> str | None:
        return versions[name] if name in versions else version(name)

    requirements = [Requirement(text) for text in patch.requires]
    releases = {name: found(name) for name in (patch.distribution, *(item.name for item in requirements))}
    if None in releases.values():
        return "skipped"
    if any(Version(str(release)) < Version(_versions.OLDEST[name]) for name, release in releases.items()):
        return "skipped"
    if not SpecifierSet(patch.affected).contains(str(found(patch.distribution)), prereleases=True):
        return "not_needed"
    if not all(item.specifier.contains(str(found(item.name)), prereleases=True) for item in requirements):
        return "skipped"
    return {None: "applied", "affected": "applied", "not_affected": "not_needed", "unknown": "failed"}[detected]
