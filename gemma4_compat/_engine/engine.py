"""gate -> arm -> detect -> apply, or roll back. Knows nothing about Gemma 4.

Rules:

1. The version says *may*, the loaded code says *is*; both are needed. Below the oldest supported release the version
   says no; beyond the newest measured one only code that has not changed since says yes.
2. ``applied`` is set after the last edit. A failed patch leaves no trace and never breaks the user's import.
3. Nothing is imported under the lock: it is taken inside import hooks, and waiting there for a module that another
   thread is importing would be a deadlock. Nothing upstream is imported at all.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, MappingProxyType
from typing import Any, TypeVar

from gemma4_compat._engine import changes as _changes
from gemma4_compat._engine import hooks
from gemma4_compat._engine import settings as _settings
from gemma4_compat._engine import versions as _versions
from gemma4_compat._engine.fingerprint import fingerprint
from gemma4_compat._engine.patch import Detection, Patch, PatchState, PatchStatus
from gemma4_compat._errors import Gemma4CompatError, Gemma4CompatWarning

_T = TypeVar("_T")
ISSUES = "https://github.com/gemma4-compat/gemma4-compat/issues"


class _Record:
    """One patch in this process."""

    def __init__(self, patch: Patch) -> None:
        self.patch = patch
        self.changes: _changes.ChangeSet | None = None
        self.warned = False
        self.again = False  # decide again when a module of it is imported (again), whatever was decided before
        self.enter(PatchState.REGISTERED, "known, not armed yet; gemma4_compat.install() arms it")

    def enter(
        self,
        state: PatchState,
        reason: str,
        *,
        versions: Mapping[str, str] | None = None,
        late: bool = False,
        detection: Detection | None = None,
    ) -> None:
        self.status = PatchStatus(
            id=self.patch.id,
            state=state,
            reason=reason,
            versions=MappingProxyType(dict(versions or {})),
            late=late,
            detection=detection,
            at=time.time(),
        )


class Engine:
    """The patches of one process. Every public method may be called from any thread, any number of times.

    Args:
        patches: what it applies, in this order.
        oldest: the oldest supported release, by distribution; nothing is applied to, or together with, older ones.
    """

    def __init__(self, patches: Iterable[Patch], oldest: Mapping[str, str] = _versions.OLDEST) -> None:
        self._lock = threading.RLock()
        self._records = {patch.id: _Record(patch) for patch in patches}
        self._oldest = oldest
        self._metadata: dict[tuple[Callable[[str], Any], str], Any] = {}  # what was read while the lock was held
        self._settings = _settings.Settings()
        self._hooked: set[str] = set()  # modules that have a hook; hooks cannot be taken back, so one is enough
        self._imported: set[str] = set()  # modules whose hook has fired
        self._two_copies: set[str] = set()  # distributions already warned about
        self._too_old: set[str] = set()  # the same

    def patches(self) -> tuple[Patch, ...]:
        """All patches, in the order in which they are applied."""
        return tuple(record.patch for record in self._records.values())

    def install(self) -> None:
        """Arm every patch that is not applied. What is imported already is patched at once, the rest on import."""
        settings = _settings.read(self._records)
        with self._locked():
            self._settings = settings
            for record in self._records.values():
                if record.status.state is not PatchState.APPLIED:
                    record.enter(PatchState.PENDING, _waiting(record.patch, self._imported))
            modules = [target.module for record in self._records.values() for target in record.patch.targets]
            fresh = [name for name in dict.fromkeys(modules) if name not in self._hooked]
            self._hooked.update(fresh)
        # Outside the lock: a module that another thread finishes importing now fires its hook, which takes the lock.
        for name in fresh:
            hooks.when_imported(name, self._on_import)
        hooks.sweep()
        self._apply_ready(late=True)

    def status(self) -> dict[str, PatchStatus]:
        """Where every patch is, by id. For patches still waiting, decided from the releases installed now."""
        hooks.sweep()
        self._apply_ready(late=True)  # a hook registered while its module was being searched for is never called
        self._fail_hopeless()
        with self._locked():
            return {patch_id: self._status(record) for patch_id, record in self._records.items()}

    def revert(self, patch_id: str | None = None) -> dict[str, PatchStatus]:
        """Undo one patch, or all, newest first, and keep it off until :meth:`install`. Returns the new status.

        Raises:
            Gemma4CompatError: no patch has that id.
        """
        with self._locked():
            if patch_id is not None and patch_id not in self._records:
                raise Gemma4CompatError(_settings.unknown_id(patch_id, self._records))
            elsewhere: list[tuple[FunctionType, Any]] = []
            try:
                for record in reversed(list(self._records.values())):
                    if patch_id is None:
                        self._revert(record, elsewhere)
                    elif patch_id == record.patch.id:
                        self._revert(record)
            finally:
                _changes.restore(elsewhere)
        return self.status()

    # ------------------------------------------------------------------------------------------------------ decisions

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Metadata is read once while the lock is held: it is slow to read, and may be another the next time."""
        with self._lock:
            self._metadata.clear()
            yield

    def _read(self, look_up: Callable[[str], _T], name: str) -> _T:
        key = (look_up, name)
        if key not in self._metadata:
            self._metadata[key] = look_up(name)
        value: _T = self._metadata[key]
        return value

    def _on_import(self, name: str) -> None:
        self._imported.add(name)
        with self._locked():
            for record in self._records.values():
                optional = name not in record.patch.modules and name in {t.module for t in record.patch.targets}
                if optional and record.changes is not None:  # decide again, with this module
                    with self._uncovered(record):
                        record.changes.undo()
                        record.changes = None
                    self._decide(record, late=record.status.late)
        self._apply_ready(late=False, trigger=name)

    def _apply_ready(self, *, late: bool, trigger: str | None = None) -> None:
        """Decide waiting patches whose modules are all there; with ``trigger``, those that need that module."""
        with self._locked():
            for record in self._records.values():
                modules = record.patch.modules
                waits = (record.again and trigger) or record.status.state is PatchState.PENDING
                if not waits or (trigger and trigger not in modules):
                    continue
                if all(name in self._imported or hooks.is_imported(name) for name in modules):
                    self._decide(record, late=late)
                else:
                    record.enter(PatchState.PENDING, _waiting(record.patch, self._imported))

    def _fail_hopeless(self) -> None:
        """Patches that wait for a module which the loaded release does not have: say so, instead of waiting on.

        Looked for where somebody asks, and not in import hooks, where a search of the disk costs too much.
        """
        with self._locked():
            waiting = [record for record in self._records.values() if record.status.state is PatchState.PENDING]
        absent = {
            name for name in {name for record in waiting for name in record.patch.modules} if hooks.is_absent(name)
        }
        with self._locked():
            for record in waiting if absent else ():
                patch = record.patch
                gone = [name for name in patch.modules if name in absent and not hooks.is_imported(name)]
                state, _, versions = self._gate(patch)
                if gone and record.status.state is state is PatchState.PENDING:
                    version = f"{patch.distribution} {versions[patch.distribution]}"
                    reason = _unknown(patch, versions, f"module {gone[0]} does not exist in {version}")
                    record.enter(PatchState.FAILED, reason, versions=versions, detection=Detection.UNKNOWN)
                    record.again = True  # should it be made after all
                    self._report_failure(record)

    def _decide(self, record: _Record, *, late: bool) -> None:
        patch = record.patch
        record.again = False
        detection = None
        state, reason, versions = self._gate(patch)
        if state is PatchState.PENDING:
            changes = _changes.ChangeSet(patch.id)
            try:
                self._check_loaded(patch)
                detection, reason = _detect(patch, versions)
                if detection is Detection.AFFECTED:
                    with self._uncovered(record):
                        try:
                            _apply(patch, changes)
                        except BaseException:
                            changes.undo()  # before what covers it comes back
                            raise
                    record.changes = changes
                    state = PatchState.APPLIED
                    reason = _applied_reason(patch, versions)
                elif detection is Detection.NOT_AFFECTED:
                    state = PatchState.NOT_NEEDED
                else:
                    state = PatchState.FAILED
            except Exception as error:  # broad: whatever goes wrong must not break the user's import
                changes.undo()
                state, reason = PatchState.FAILED, f"{type(error).__name__}: {error}"
                detection = None
                if not isinstance(error, Gemma4CompatError) and _is_unmeasured(patch, versions):
                    detection, reason = Detection.UNKNOWN, f"{_unmeasured('unknown', patch, versions)}: {reason}"
        late = late and state is PatchState.APPLIED
        record.enter(state, reason, versions=versions, late=late, detection=detection)
        # Last, when everything is decided: a user may have turned warnings into errors.
        self._warn_two_copies(versions)
        if state is PatchState.SKIPPED:
            self._report_too_old(record)
        if state is PatchState.FAILED:
            self._report_failure(record)

    def _gate(self, patch: Patch) -> tuple[PatchState, str, dict[str, str]]:
        """What settings and versions alone decide. PENDING means: nothing against it."""
        requirements = [_versions.requirement(text) for text in patch.requires]
        names = [patch.distribution, *(name for name, _ in requirements)]
        # The loaded one counts, else the installed one.
        current = {name: _versions.loaded(name) or self._read(_versions.installed, name) for name in names}
        versions = {name: version for name, version in current.items() if version is not None}
        if patch.id in self._settings.disabled:
            return PatchState.SKIPPED, "disabled by GEMMA4_COMPAT_DISABLE", versions
        if patch.opt_in and patch.id not in self._settings.enabled:
            return PatchState.SKIPPED, f"opt-in; set GEMMA4_COMPAT_ENABLE={patch.id}", versions
        for name in names:
            if name not in versions:
                return PatchState.SKIPPED, f"{name} is not installed", versions
        for name in names:
            if (too_old := _versions.too_old(name, versions[name], self._oldest)) is not None:
                return PatchState.SKIPPED, too_old, versions
        version = versions[patch.distribution]
        if not _versions.admits(patch.affected, version):
            fixed = f" (fixed in {patch.fixed})" if patch.fixed else ""
            reason = f"{patch.distribution} {version} is outside {patch.affected}{fixed}"
            return PatchState.NOT_NEEDED, reason, versions
        for name, specifier in requirements:
            if not _versions.admits(specifier, versions[name]):
                reason = f"only needed with {name}{specifier}; {name} is {versions[name]}"
                return PatchState.SKIPPED, reason, versions
        return PatchState.PENDING, "", versions

    def _check_loaded(self, patch: Patch) -> None:
        for name in [patch.distribution, *(_versions.requirement(text)[0] for text in patch.requires)]:
            loaded, installed = _versions.loaded(name), self._read(_versions.installed, name)
            if loaded and installed and _versions.differ(loaded, installed):
                raise Gemma4CompatError(
                    f"{name} {loaded} is loaded but {installed} is installed now (upgraded while Python was "
                    "running?); restart Python"
                )

    def _warn_two_copies(self, names: Iterable[str]) -> None:
        for name in names:
            found = self._read(_versions.copies, name)
            if len(set(found.values())) > 1 and name not in self._two_copies:
                self._two_copies.add(name)
                listed = ", ".join(f"{version} in {folder}" for folder, version in found.items())
                _warn(
                    f"several releases of {name} are on sys.path: {listed}. Python uses the first; remove the others."
                )

    def _revert(self, record: _Record, elsewhere: list[tuple[FunctionType, Any]] | None = None) -> None:
        record.again = False
        if record.changes is None:
            # One that waits for a module it will never need, on this release, stays not needed.
            if record.status.state is PatchState.PENDING and self._gate(record.patch)[0] is PatchState.PENDING:
                record.enter(PatchState.REVERTED, "reverted before it was applied; install() arms it again")
            return
        with self._uncovered(record):
            left = record.changes.undo(elsewhere)
            record.changes = None
        reason = "reverted; install() applies it again"
        if left:
            reason += (
                f" ({', '.join(left)}: replaced by another library since, so ours stays under it and passes through)"
            )
        record.enter(PatchState.REVERTED, reason, versions=record.status.versions)

    @contextlib.contextmanager
    def _uncovered(self, record: _Record) -> Iterator[None]:
        """Inside, later patches that replace the same functions are off: one on top of another must come off first.

        So must what is on top of these in turn, on their other functions.
        """
        records = list(self._records.values())
        targets = {str(target) for target in record.patch.targets}
        covering: list[_Record] = []
        for other in records[records.index(record) + 1 :]:
            others = {str(target) for target in other.patch.targets}
            if other.changes is not None and targets & others:
                covering.append(other)
                targets |= others
        for other in reversed(covering):
            assert other.changes is not None
            other.changes.undo()
        try:
            yield
        finally:
            for other in covering:
                other.changes = _changes.ChangeSet(other.patch.id)
                try:
                    _apply(other.patch, other.changes)
                except Exception as error:
                    other.changes.undo()
                    other.changes = None
                    other.enter(PatchState.FAILED, f"{type(error).__name__}: {error}", versions=other.status.versions)
                    self._report_failure(other)

    def _status(self, record: _Record) -> PatchStatus:
        status = record.status
        if status.state is PatchState.PENDING:
            state, reason, versions = self._gate(record.patch)
            reason = status.reason if state is PatchState.PENDING else reason
            return PatchStatus(id=status.id, state=state, reason=reason, versions=versions, at=status.at)
        if record.changes is not None and (overridden := record.changes.overridden()):
            reason = f"{status.reason}; replaced by another library since: {', '.join(overridden)}"
            return PatchStatus(
                id=status.id,
                state=status.state,
                reason=reason,
                versions=status.versions,
                late=status.late,
                overridden=overridden,
                detection=status.detection,
                at=status.at,
            )
        return status

    def _report_too_old(self, record: _Record) -> None:
        """Once a library, when it is loaded: an old one that is only installed harms nobody."""
        for name, version in record.status.versions.items():
            too_old = _versions.too_old(name, version, self._oldest)
            if record.status.reason != too_old or not _versions.is_loaded(name):
                continue
            message = f"{too_old}. Nothing that concerns it is repaired; GEMMA4_COMPAT_DISABLE=all silences this."
            if self._settings.strict:
                record.again = True  # see _report_failure
                raise Gemma4CompatError(message)
            if name not in self._too_old:
                self._too_old.add(name)
                _warn(message)

    def _report_failure(self, record: _Record) -> None:
        patch, status = record.patch, record.status
        versions = ", ".join(f"{name} {version}" for name, version in status.versions.items())
        message = (
            f"patch {patch.id!r} was not applied, nothing was changed: {status.reason} [{versions}]. Without it: "
            f"{patch.symptom} (`gemma4-compat doctor {patch.id}` looks whether it is still so). Please report it at "
            f"{ISSUES}; GEMMA4_COMPAT_DISABLE={patch.id} silences this."
        )
        if self._settings.strict:
            # It makes the import fail; the same import, tried again, must not succeed unpatched.
            record.again = True
            raise Gemma4CompatError(message)
        if not record.warned:
            record.warned = True
            _warn(message)


def _apply(patch: Patch, changes: _changes.ChangeSet) -> None:
    for target in patch.targets:
        if not target.optional or _exists(target.module, target.name):
            changes.replace(target.module, target.name, target.replacement)


def _detect(patch: Patch, versions: Mapping[str, str]) -> tuple[Detection, str]:
    """Compare the loaded code with the code the patch was proven on.

    What the targets call is not compared. A release that changes only that is seen by ``doctor``, which runs the
    reproductions.
    """
    if patch.detect is not None and (said := patch.detect()) is not Detection.AFFECTED:
        return said, f"looked at the loaded {patch.distribution} on this host: {said.replace('_', ' ')}"
    for target in patch.targets:
        if not _exists(target.module, target.name):
            if target.optional:
                continue
            return Detection.UNKNOWN, _unknown(patch, versions, f"{target} does not exist")
        owner, attribute = _changes.resolve_owner(target.module, target.name)
        found = fingerprint(_changes.raw_slot(owner, attribute))
        if found not in target.known:
            if _is_unmeasured(patch, versions):
                what = f"{target} is not the code this was proven on (fingerprint {found})"
            else:
                what = f"the code of {target} is unknown (fingerprint {found}): edited, or replaced by another library"
            return Detection.UNKNOWN, _unknown(patch, versions, what)
    return Detection.AFFECTED, ""


def _unknown(patch: Patch, versions: Mapping[str, str], what: str) -> str:
    """Why the code of a release is not what it should be; beyond what was measured, that release is the reason."""
    return f"{_unmeasured('changed', patch, versions)}: {what}" if _is_unmeasured(patch, versions) else what


def _unmeasured(code: str, patch: Patch, versions: Mapping[str, str]) -> str:
    release = f"{patch.distribution} {versions[patch.distribution]}"
    return f"unmeasured release, code {code} ({release}; measured up to {patch.measured})"


def _is_unmeasured(patch: Patch, versions: Mapping[str, str]) -> bool:
    return _versions.newer(versions[patch.distribution], than=patch.measured)


def _exists(module: str, name: str) -> bool:
    try:
        owner, attribute = _changes.resolve_owner(module, name)
        _changes.raw_slot(owner, attribute)
    except (KeyError, AttributeError):
        return False
    return True


def _applied_reason(patch: Patch, versions: Mapping[str, str]) -> str:
    if _is_unmeasured(patch, versions):
        return _unmeasured("unchanged", patch, versions)
    return f"repairs {patch.distribution} {versions[patch.distribution]}"


def _waiting(patch: Patch, imported: Iterable[str]) -> str:
    missing = [name for name in patch.modules if name not in set(imported) and not hooks.is_imported(name)]
    packages = [name.partition(".")[0] for name in missing]
    named = [name if package in sys.modules else package for name, package in zip(missing, packages)]
    return f"waiting for the import of {', '.join(dict.fromkeys(named))}" if missing else "armed"


def _warn(message: str) -> None:
    warnings.warn(message, Gemma4CompatWarning, stacklevel=2)
