"""The loaded code against the code that a patch was proven on.

What the targets call is not compared. A release that changes only that is seen by ``doctor``, which runs the
reproductions.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from gemma4_compat._engine import changes, hooks, versions
from gemma4_compat._engine.fingerprint import fingerprint
from gemma4_compat._engine.patch import Detection, Patch, Target


class Found(NamedTuple):
    """What the loaded code said.

    Attributes:
        detection: AFFECTED where at least one group of targets is to be replaced.
        reason: why it is not; where it is, why other groups are not.
        groups: of targets to replace.
    """

    detection: Detection
    reason: str = ""
    groups: frozenset[str] = frozenset()


def detect(patch: Patch, ready: Collection[str], releases: Mapping[str, str]) -> Found:
    """Look at the targets of the groups that are ``ready``.

    Args:
        patch: the releases are inside its ``affected``.
        ready: groups of targets whose modules are imported.
        releases: by distribution.
    """
    if patch.detect is not None and (said := patch.detect()) is not Detection.AFFECTED:
        return Found(said, f"looked at the loaded {patch.distribution} on this host: {said.replace('_', ' ')}")
    unknown = {group: why for group in patch.groups if group in ready and (why := _unknown(patch, group, releases))}
    known = frozenset(ready) - unknown.keys()
    if not known:
        return Found(Detection.UNKNOWN, next(iter(unknown.values())))
    return Found(Detection.AFFECTED, "; ".join(f"not in {group}: {why}" for group, why in unknown.items()), known)


def apply(patch: Patch, groups: Collection[str], edits: changes.ChangeSet) -> None:
    """Replace the targets of these groups."""
    for target in patch.targets:
        if target.group in groups and not (target.optional and not _exists(target)):
            edits.replace(target.module, target.name, target.replacement)


def applied(patch: Patch, releases: Mapping[str, str]) -> str:
    """The reason of an applied patch."""
    if is_unmeasured(patch, releases):
        return unmeasured("unchanged", patch, releases)
    return f"repairs {patch.distribution} {releases[patch.distribution]}"


def is_unmeasured(patch: Patch, releases: Mapping[str, str]) -> bool:
    """Whether the release is newer than what the patch was proven on."""
    return versions.newer(releases[patch.distribution], than=patch.measured)


def unmeasured(code: str, patch: Patch, releases: Mapping[str, str]) -> str:
    """What is said of a release beyond the measured ones, whose code is ``code`` ("changed", ...)."""
    release = f"{patch.distribution} {releases[patch.distribution]}"
    return f"unmeasured release, code {code} ({release}; measured up to {patch.measured})"


def explained(patch: Patch, releases: Mapping[str, str], what: str) -> str:
    """Why the code of a release is not what it should be; beyond what was measured, that release is the reason."""
    return f"{unmeasured('changed', patch, releases)}: {what}" if is_unmeasured(patch, releases) else what


def waiting(patch: Patch, imported: Iterable[str]) -> str:
    """What a pending patch waits for: the packages, or the modules of those that are imported."""
    there = set(imported)
    missing = [name for name in patch.modules if name not in there and not hooks.is_imported(name)]
    packages = [name.partition(".")[0] for name in missing]
    named = [name if package in sys.modules else package for name, package in zip(missing, packages)]
    return f"waiting for the import of {', '.join(dict.fromkeys(named))}" if missing else "armed"


def _unknown(patch: Patch, group: str, releases: Mapping[str, str]) -> str | None:
    """Why the targets of a group are not the code that the patch was proven on; None when they are."""
    for target in patch.targets:
        if target.group != group:
            continue
        if not _exists(target):
            if target.optional:
                continue
            return explained(patch, releases, f"{target} does not exist")
        owner, attribute = changes.resolve_owner(target.module, target.name)
        found = fingerprint(changes.raw_slot(owner, attribute))
        if found not in target.known:
            if is_unmeasured(patch, releases):
                what = f"{target} is not the code this was proven on (fingerprint {found})"
            else:
                what = f"the code of {target} is unknown (fingerprint {found}): edited, or replaced by another library"
            return explained(patch, releases, what)
    return None


def _exists(target: Target) -> bool:
    try:
        owner, attribute = changes.resolve_owner(target.module, target.name)
        changes.raw_slot(owner, attribute)
    except (KeyError, AttributeError):
        return False
    return True
