"""Compare the loaded code with the code that a patch was proven on.

Functions that a target calls are not compared. If a release changes only those, ``doctor`` notices: it runs the
reproductions.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from gemma4_compat._engine import changes, hooks, versions
from gemma4_compat._engine.fingerprint import fingerprint, foreign, library, stranger
from gemma4_compat._engine.patch import Detection, Patch, Reason, Target

NO_SOURCE = (
    "patches are off because a library is installed without its .py files (frozen, or only as .pyc): code is replaced "
    "only after its source was compared with the code that a patch was proven on. Install the sources as well "
    "(PyInstaller: module_collection_mode 'pyz+py' for the library). `gemma4_compat.status()` names the patches, "
    "GEMMA4_COMPAT_DISABLE=all silences this."
)


class _Why(NamedTuple):
    """Why the targets of a group are not replaced; ``library``: the other library that has patched one of them."""

    code: Reason
    text: str
    library: str = ""


class Found(NamedTuple):
    """The result of the comparison.

    Attributes:
        detection: AFFECTED if at least one group of targets is to be replaced.
        code: why that is the result.
        reason: why nothing is replaced; if something is, why the other groups are not.
        groups: the groups of targets to replace.
        notice: one warning for all patches that fail for this reason or because of ``library``, in place of one each.
        library: the other library that is the reason.
    """

    detection: Detection
    code: Reason
    reason: str = ""
    groups: frozenset[str] = frozenset()
    notice: str | None = None
    library: str = ""


def detect(patch: Patch, ready: Collection[str], releases: Mapping[str, str]) -> Found:
    """Look at the targets of the groups that are ``ready``.

    Args:
        patch: its ``affected`` admits the releases.
        ready: groups of targets whose modules are imported.
        releases: by distribution.
    """
    if patch.detect is not None and (said := patch.detect()) is not Detection.AFFECTED:
        code = Reason.NO_DEFECT if said is Detection.NOT_AFFECTED else Reason.UNRECOGNIZED
        return Found(said, code, f"looked at the loaded {patch.distribution} on this host: {said.replace('_', ' ')}")
    unknown = {group: why for group in patch.groups if group in ready and (why := _unknown(patch, group, releases))}
    known = frozenset(ready) - unknown.keys()
    if unknown:  # a group without a target in this release repairs nothing
        known &= {target.group for target in patch.targets if not _is_left_out(patch, target)}
    notice = NO_SOURCE if any(why.code is Reason.NO_SOURCE for why in unknown.values()) else None
    first, other = next(iter(unknown.values()), None), ""
    if first and all(why.library for why in unknown.values()):
        other, notice = first.library, beside(first.library, first.text)
    if first and not known:
        return Found(Detection.UNKNOWN, first.code, first.text, notice=notice, library=other)
    if unknown:
        where = [f"not in {group}" if group else "in part" for group in unknown]
        reason = "; ".join(f"{part}: {why.text}" for part, why in zip(where, unknown.values()))
        return Found(Detection.AFFECTED, Reason.IN_PART, reason, known, notice, other)
    code = Reason.UNMEASURED if is_unmeasured(patch, releases) else Reason.AFFECTED
    return Found(Detection.AFFECTED, code, groups=known)


def apply(patch: Patch, groups: Collection[str], edits: changes.ChangeSet, *, late: bool = True) -> None:
    """Replace the targets of these groups. ``late``: their library may have been used before."""
    may_be = not any(target.activator and _is_left_out(patch, target) for target in patch.targets)
    for target in patch.targets:
        if target.group in groups and not _is_left_out(patch, target):
            dormant = may_be and (target.dormant(late) if callable(target.dormant) else target.dormant)
            edits.replace(target.module, target.name, target.replacement, dormant=dormant, attribute=target.attribute)


def applied(patch: Patch, releases: Mapping[str, str], found: Found) -> str:
    """Why a patch is applied, in words."""
    repairs = f"repairs {patch.distribution} {releases[patch.distribution]}"
    if is_unmeasured(patch, releases):
        repairs = unmeasured("unchanged", patch, releases)
    return "; ".join(filter(None, (repairs, found.reason)))


def is_unmeasured(patch: Patch, releases: Mapping[str, str]) -> bool:
    """Whether the release is newer than those on which the patch was proven."""
    return versions.newer(releases[patch.distribution], than=patch.measured)


def unmeasured(code: str, patch: Patch, releases: Mapping[str, str]) -> str:
    """The words for a release newer than the measured ones, whose code is ``code`` ("changed", ...)."""
    release = f"{patch.distribution} {releases[patch.distribution]}"
    return f"unmeasured release, code {code} ({release}; measured up to {patch.measured})"


def explained(patch: Patch, releases: Mapping[str, str], what: str) -> str:
    """``what`` is wrong with the code of a release, after a note if the release is newer than the measured ones."""
    return f"{unmeasured('changed', patch, releases)}: {what}" if is_unmeasured(patch, releases) else what


def beside(name: str, reason: str) -> str:
    """Say once that a library has patched what patches repair, and what to do; ``reason``: why the first is off."""
    order = list(sys.modules)
    advice = f"Leave out what {name} does there, or use one of the two."
    if order.index(name) < order.index("gemma4_compat"):
        advice = f"Import gemma4_compat before {name}; if this is said again, use one of the two."
    return (
        f"{reason}. This and other repairs of functions that {name} has patched are off, and its code runs there: "
        f"`gemma4_compat.status()` names them. {advice} GEMMA4_COMPAT_DISABLE=ID,ID silences this."
    )


def waiting(patch: Patch, ending: str | None = None) -> str:
    """What a pending patch waits for: packages, and modules of packages that are imported.

    Args:
        patch: the pending patch.
        ending: a module whose import is about to end.
    """
    missing = [name for name in patch.modules if name != ending and not hooks.is_imported(name)]
    packages = [name.partition(".")[0] for name in missing]
    named = [name if package in sys.modules else package for name, package in zip(missing, packages)]
    return f"waiting for the import of {', '.join(dict.fromkeys(named))}" if missing else "armed"


def absent(patch: Patch, releases: Mapping[str, str], module: str) -> str:
    """The words for a module that the release does not have."""
    what = f"module {module} does not exist in {patch.distribution} {releases[patch.distribution]}"
    return explained(patch, releases, what)


def _unknown(patch: Patch, group: str, releases: Mapping[str, str]) -> _Why | None:
    """Why the targets of a group are not the code that the patch was proven on; None if they are."""
    for target in patch.targets:
        if target.group != group or _is_left_out(patch, target):
            continue
        if not _exists(target):
            return _Why(Reason.MODULE_ABSENT, explained(patch, releases, f"{target} does not exist"))
        raw = _raw(target)
        try:
            found = fingerprint(raw)
        except OSError as error:
            return _Why(Reason.NO_SOURCE, f"the source of {target} is not there ({error})")
        if found not in target.known:
            home = target.module.partition(".")[0]
            if (other := foreign(changes.function_of(raw), home, changes.is_installed)) is not None:
                return _Why(Reason.REPLACED, f"{other} is in the place of {target}", library(other))
            if is_unmeasured(patch, releases) or target.codes:
                what = f"{target} is not the code this was proven on (fingerprint {found})"
            else:
                what = f"the code of {target} is unknown (fingerprint {found}): edited, or replaced by another library"
            return _Why(Reason.CODE_DIFFERS, explained(patch, releases, what))
        if (wrapper := _wrapped_by(patch, target, raw)) is not None:
            text = (
                f"{wrapper} wraps {target}, and this was not proven on top of it; import gemma4_compat first, so that "
                "it wraps the repaired function"
            )
            return _Why(Reason.WRAPPED, text, library(wrapper))
    return None


def _wrapped_by(patch: Patch, target: Target, raw: object) -> str | None:
    """The foreign wrapper around a target's code; None if the code is not wrapped, or if this patch is underneath."""
    if changes.beneath(raw, patch.id, str(target)) is not None:
        return None
    return stranger(changes.function_of(raw), changes.is_installed)


def _is_left_out(patch: Patch, target: Target) -> bool:
    release = versions.current(patch.distribution) if target.affected else None
    if release is not None and not versions.admits(target.affected, release):
        return True
    if not target.activator or not _exists(target):
        return (target.optional or target.activator) and not _exists(target)
    raw = _raw(target)
    try:
        return fingerprint(raw) not in target.known or _wrapped_by(patch, target, raw) is not None
    except OSError:  # no source: as unknown as other code
        return True


def _exists(target: Target) -> bool:
    try:
        _raw(target)
    except (KeyError, AttributeError):
        return False
    return True


def _raw(target: Target) -> Any:
    owner, name = changes.resolve_owner(target.module, target.name)
    return changes.raw_slot(owner, name, attribute=target.attribute)
