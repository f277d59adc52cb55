"""gate -> arm -> detect -> apply, or roll back. Knows nothing about Gemma 4.

Rules:

1. The version says *may*, the loaded code says *is*; both are needed. Below the oldest supported release the version
   says no; beyond the newest measured one only code that has not changed since says yes.
2. ``applied`` is set after the last edit. A failed patch leaves no trace and never breaks the user's import; one whose
   file cannot be imported is a failed patch.
3. Nothing is imported under the lock: it is taken inside import hooks, and waiting there for a module that another
   thread is importing would be a deadlock. Nothing upstream is imported at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any, TypeVar

from gemma4_compat._engine import detection, hooks, settings, versions
from gemma4_compat._engine.changes import ChangeSet, reach, restore
from gemma4_compat._engine.patch import Detection, LatePatch, Patch, PatchState, PatchStatus
from gemma4_compat._engine.record import Record
from gemma4_compat._errors import Gemma4CompatError, Gemma4CompatWarning

_T = TypeVar("_T")
ISSUES = "https://github.com/gemma4-compat/gemma4-compat/issues"


class Engine:
    """The patches of one process. Every public method may be called from any thread, any number of times.

    Args:
        patches: what it applies, in this order. The file of a late one is imported when a module of it is.
        oldest: the oldest supported release, by distribution; nothing is applied to, or together with, older ones.
    """

    def __init__(self, patches: Iterable[Patch | LatePatch], oldest: Mapping[str, str] = versions.OLDEST) -> None:
        self._lock = threading.RLock()
        self._records = {patch.id: Record(patch) for patch in patches}
        self._oldest = oldest
        self._metadata: dict[tuple[Callable[[str], Any], str], Any] = {}  # what was read while the lock was held
        self._settings = settings.Settings()
        self._hooked: set[str] = set()  # modules that have a hook; hooks cannot be taken back, so one is enough
        self._imported: set[str] = set()  # modules whose hook has fired
        self._two_copies: set[str] = set()  # distributions already warned about
        self._too_old: set[str] = set()  # the same
        self._notices: set[str] = set()  # what was said of many patches

    def patches(self) -> tuple[Patch, ...]:
        """All patches, in the order in which they are applied, but for those whose file cannot be imported."""
        self._load(self._records.values())
        return tuple(record.patch for record in self._records.values() if record.is_loaded)

    def install(self) -> None:
        """Arm every patch that is not applied. What is imported already is patched at once, the rest on import."""
        read = settings.read(self._records)
        with self._locked():
            self._settings = read
            for record in self._records.values():
                if record.status.state is not PatchState.APPLIED:
                    record.broken = None
                    record.enter(PatchState.PENDING, "waiting for the import of its library")
            modules = dict.fromkeys(name for record in self._records.values() for name in sorted(record.modules))
            fresh = [name for name in modules if name not in self._hooked]
            self._hooked.update(fresh)
        # Outside the lock: a module that another thread finishes importing now fires its hook, which takes the lock.
        for name in fresh:
            hooks.when_imported(name, self._on_import)
        hooks.sweep()
        there = {name for name in modules if name in self._imported or hooks.is_imported(name)}
        self._load(record for record in self._records.values() if record.modules & there)
        with self._locked():
            for name in there:
                self._apply_again(name, reloaded=False)
        self._apply_ready(late=True)

    def status(self) -> dict[str, PatchStatus]:
        """Where every patch is, by id. For patches still waiting, decided from the releases installed now."""
        self._load(self._records.values())
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
        if patch_id is not None and patch_id not in self._records:
            raise Gemma4CompatError(settings.unknown_id(patch_id, self._records))
        self._load(record for record in self._records.values() if patch_id in (None, record.id))
        with self._locked():
            elsewhere: list[tuple[FunctionType, Any]] = []
            try:
                for record in reversed(list(self._records.values())):
                    if patch_id is None:
                        self._revert(record, elsewhere)
                    elif patch_id == record.id:
                        self._revert(record)
            finally:
                restore(elsewhere)
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

    def _load(self, records: Iterable[Record]) -> None:
        """Import the files of these patches. Not under the lock."""
        wanted = list(records)
        for record in wanted:
            record.load()
        with self._locked():
            for record in wanted:
                if record.broken is not None and record.status.state is PatchState.PENDING:
                    disabled = record.id in self._settings.disabled
                    state = PatchState.SKIPPED if disabled else PatchState.FAILED
                    record.enter(state, "disabled by GEMMA4_COMPAT_DISABLE" if disabled else record.broken)
                    if not disabled:
                        self._report_failure(record)

    def _on_import(self, name: str) -> None:
        self._imported.add(name)
        self._load(record for record in self._records.values() if name in record.modules)
        with self._locked():
            self._apply_again(name, reloaded=True)
            for record in self._records.values():
                if record.changes is None or name not in record.modules:
                    continue
                groups = record.patch.groups
                if not any(name in groups[group] for group in record.groups):  # decide again, with this module
                    with self._uncovered(record):
                        record.changes.undo()
                        record.changes = None
                    self._decide(record, self._ready(record.patch), late=record.status.late)
        self._apply_ready(late=False, trigger=name)

    def _apply_again(self, name: str, *, reloaded: bool) -> None:
        """Apply patches again whose functions in this module are defined anew: it was executed a second time.

        What they installed elsewhere stays, in the classes that were there before (they have instances), too.
        """
        for record in self._records.values():
            if record.changes is None or name not in record.modules:
                continue
            targets = [target for target in record.patch.targets if target.module == name]
            lost = [
                target
                for target in targets
                if target.group in record.groups and record.changes.is_lost(target.module, target.name)
            ]
            if not lost:
                continue
            found = detection.detect(record.patch, record.groups, record.status.versions)
            again = found.detection is Detection.AFFECTED and found.groups == record.groups
            if again:
                record.changes.forget(name)
                with contextlib.suppress(Exception):  # it fails below once more, and is reported
                    for target in lost:
                        record.changes.replace(target.module, target.name, target.replacement)
                    continue
            if again or reloaded:  # into other code; without a reload, another library has replaced it
                with self._uncovered(record):
                    record.changes.undo()
                    record.changes = None
                self._decide(record, self._ready(record.patch), late=record.status.late)

    def _apply_ready(self, *, late: bool, trigger: str | None = None) -> None:
        """Decide waiting patches whose modules are all there; with ``trigger``, those that need that module."""
        waited: list[Record] = []
        with self._locked():
            for record in self._records.values():
                waits = (record.again and trigger) or record.status.state is PatchState.PENDING
                if not waits or not record.is_loaded or (trigger and trigger not in record.patch.modules):
                    continue
                if ready := self._ready(record.patch):
                    self._decide(record, ready, late=late)
                    waited += [record] if late or len(record.modules) > 1 else []
                else:
                    record.enter(PatchState.PENDING, detection.waiting(record.patch, self._imported))
            reach(record.changes for record in waited)

    def _ready(self, patch: Patch) -> frozenset[str]:
        """The groups of targets whose modules are all there."""
        return frozenset(
            group
            for group, modules in patch.groups.items()
            if all(name in self._imported or hooks.is_imported(name) for name in modules)
        )

    def _fail_hopeless(self) -> None:
        """Patches that wait for a module which the loaded release does not have: say so, instead of waiting on.

        Looked for where somebody asks, and not in import hooks, where a search of the disk costs too much.
        """
        with self._locked():
            waiting = [
                record
                for record in self._records.values()
                if record.is_loaded and record.status.state is PatchState.PENDING
            ]
        absent = {
            name for name in {name for record in waiting for name in record.patch.modules} if hooks.is_absent(name)
        }
        with self._locked():
            for record in waiting if absent else ():
                patch = record.patch
                gone = [
                    next((name for name in modules if name in absent and not hooks.is_imported(name)), None)
                    for modules in patch.groups.values()
                ]
                state, _, releases = self._gate(patch)
                if None not in gone and record.status.state is state is PatchState.PENDING:
                    version = f"{patch.distribution} {releases[patch.distribution]}"
                    reason = detection.explained(patch, releases, f"module {gone[0]} does not exist in {version}")
                    record.enter(PatchState.FAILED, reason, versions=releases, detection=Detection.UNKNOWN)
                    record.again = True  # should it be made after all
                    self._report_failure(record)

    def _decide(self, record: Record, ready: frozenset[str], *, late: bool) -> None:
        patch = record.patch
        record.again = False
        found = None
        state, reason, releases = self._gate(patch)
        if state is PatchState.PENDING:
            edits = ChangeSet(patch.id)
            try:
                self._check_loaded(patch)
                found = detection.detect(patch, ready, releases)
                reason = found.reason
                if found.detection is Detection.AFFECTED:
                    with self._uncovered(record):
                        try:
                            detection.apply(patch, found.groups, edits)
                        except BaseException:
                            edits.undo()  # before what covers it comes back
                            raise
                    record.changes, record.groups = edits, found.groups
                    state = PatchState.APPLIED
                    reason = "; ".join(filter(None, (detection.applied(patch, releases), found.reason)))
                elif found.detection is Detection.NOT_AFFECTED:
                    state = PatchState.NOT_NEEDED
                else:
                    state = PatchState.FAILED
            except Exception as error:  # broad: whatever goes wrong must not break the user's import
                edits.undo()
                state, reason = PatchState.FAILED, f"{type(error).__name__}: {error}"
                found = None
                if not isinstance(error, Gemma4CompatError) and detection.is_unmeasured(patch, releases):
                    found = detection.Found(Detection.UNKNOWN)
                    reason = f"{detection.unmeasured('unknown', patch, releases)}: {reason}"
        applied = state is PatchState.APPLIED
        said = None if found is None else found.detection
        record.enter(state, reason, versions=releases, late=late and applied, detection=said)
        # Last, when everything is decided: a user may have turned warnings into errors.
        self._warn_two_copies(releases)
        if state is PatchState.SKIPPED:
            self._report_too_old(record)
        notice = None if found is None else found.notice
        if state is PatchState.FAILED:
            record.again = ready != patch.groups.keys()  # another group of it may be known
            self._report_failure(record, notice)
        elif applied and found is not None and found.reason:
            self._report_failure(record, notice)

    def _gate(self, patch: Patch) -> tuple[PatchState, str, dict[str, str]]:
        """What settings and versions alone decide. PENDING means: nothing against it."""
        requirements = [versions.requirement(text) for text in patch.requires]
        names = [patch.distribution, *(name for name, _ in requirements)]
        # The loaded one counts, else the installed one.
        current = {name: versions.loaded(name) or self._read(versions.installed, name) for name in names}
        releases = {name: version for name, version in current.items() if version is not None}
        if patch.id in self._settings.disabled:
            return PatchState.SKIPPED, "disabled by GEMMA4_COMPAT_DISABLE", releases
        for name in names:
            if name not in releases:
                return PatchState.SKIPPED, f"{name} is not installed", releases
        for name in names:
            if (too_old := versions.too_old(name, releases[name], self._oldest)) is not None:
                return PatchState.SKIPPED, too_old, releases
        version = releases[patch.distribution]
        if not versions.admits(patch.affected, version):
            fixed = f" (fixed in {patch.fixed})" if patch.fixed else ""
            reason = f"{patch.distribution} {version} is outside {patch.affected}{fixed}"
            return PatchState.NOT_NEEDED, reason, releases
        for name, specifier in requirements:
            if not versions.admits(specifier, releases[name]):
                reason = f"only needed with {name}{specifier}; {name} is {releases[name]}"
                return PatchState.SKIPPED, reason, releases
        return PatchState.PENDING, "", releases

    def _check_loaded(self, patch: Patch) -> None:
        for name in [patch.distribution, *(versions.requirement(text)[0] for text in patch.requires)]:
            loaded, installed = versions.loaded(name), self._read(versions.installed, name)
            if loaded and installed and versions.differ(loaded, installed):
                raise Gemma4CompatError(
                    f"{name} {loaded} is loaded but {installed} is installed now (upgraded while Python was "
                    "running?); restart Python"
                )

    def _warn_two_copies(self, names: Iterable[str]) -> None:
        for name in names:
            found = self._read(versions.copies, name)
            if len(set(found.values())) > 1 and name not in self._two_copies:
                self._two_copies.add(name)
                listed = ", ".join(f"{version} in {folder}" for folder, version in found.items())
                _warn(
                    f"several releases of {name} are on sys.path: {listed}. Python uses the first; remove the others."
                )

    def _revert(self, record: Record, elsewhere: list[tuple[FunctionType, Any]] | None = None) -> None:
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
    def _uncovered(self, record: Record) -> Iterator[None]:
        """Inside, later patches that replace the same functions are off: one on top of another must come off first.

        So must what is on top of these in turn, on their other functions.
        """
        records = list(self._records.values())
        targets = {str(target) for target in record.patch.targets}
        covering: list[Record] = []
        for other in records[records.index(record) + 1 :]:
            if other.changes is None:
                continue
            others = {str(target) for target in other.patch.targets}
            if targets & others:
                covering.append(other)
                targets |= others
        for other in reversed(covering):
            assert other.changes is not None
            other.changes.undo()
        try:
            yield
        finally:
            for other in covering:
                other.changes = ChangeSet(other.id)
                try:
                    detection.apply(other.patch, other.groups, other.changes)
                except Exception as error:
                    other.changes.undo()
                    other.changes = None
                    other.enter(PatchState.FAILED, f"{type(error).__name__}: {error}", versions=other.status.versions)
                    self._report_failure(other)
            reach(other.changes for other in covering)

    # --------------------------------------------------------------------------------------------------- what is said

    def _status(self, record: Record) -> PatchStatus:
        status = record.status
        if not record.is_loaded:
            return status
        if status.state is PatchState.PENDING:
            state, reason, releases = self._gate(record.patch)
            reason = status.reason if state is PatchState.PENDING else reason
            return PatchStatus(id=status.id, state=state, reason=reason, versions=releases, at=status.at)
        if record.changes is None:
            return status
        reason = status.reason
        if overridden := record.changes.overridden():
            reason += f"; replaced by another library since: {', '.join(overridden)}"
        if unreached := record.changes.unreached():
            reason += f"; places that took what it replaces before, and call the original: {unreached}"
        if unmet := tuple(name for name in record.patch.needs if self._is_off(name)):
            reason += (
                f"; not exact without {', '.join(f'{name} ({self._records[name].status.state})' for name in unmet)}"
            )
        return dataclasses.replace(status, reason=reason, overridden=overridden, unmet=unmet, unreached=unreached)

    def _is_off(self, patch_id: str) -> bool:
        """Whether a patch is off that could be on. One whose library is absent, or has no defect, is not missed."""
        record = self._records.get(patch_id)
        if record is None:  # an engine with some of the patches
            return False
        skipped = record.status.state is PatchState.SKIPPED and record.id in self._settings.disabled
        return skipped or record.status.state in (PatchState.FAILED, PatchState.REVERTED)

    def _report_too_old(self, record: Record) -> None:
        """Once a library, when it is loaded: an old one that is only installed harms nobody."""
        for name, version in record.status.versions.items():
            too_old = versions.too_old(name, version, self._oldest)
            if record.status.reason != too_old or not versions.is_loaded(name):
                continue
            message = f"{too_old}. Nothing that concerns it is repaired; GEMMA4_COMPAT_DISABLE=all silences this."
            if self._settings.strict:
                record.again = True  # see _report_failure
                raise Gemma4CompatError(message)
            if name not in self._too_old:
                self._too_old.add(name)
                _warn(message)

    def _report_failure(self, record: Record, notice: str | None = None) -> None:
        """Once a patch; or, where one cause keeps many off, the ``notice`` of it, once for all."""
        status = record.status
        happened = "was not applied, nothing was changed"
        if status.state is PatchState.APPLIED:
            happened = "was applied in part"
        without = f"Without it: {record.patch.first_symptom} " if record.is_loaded and record.patch.symptom else ""
        seen = f" [{', '.join(f'{name} {version}' for name, version in status.versions.items())}]"
        message = (
            f"patch {record.id!r} {happened}: {status.reason}{seen if status.versions else ''}. {without}"
            f"(`gemma4-compat doctor {record.id}` looks whether it is still so). Please report it at "
            f"{ISSUES}; GEMMA4_COMPAT_DISABLE={record.id} silences this."
        )
        if self._settings.strict:
            # It makes the import fail; the same import, tried again, must not succeed unpatched.
            # (Of one that is applied in part, the group that is missing is looked at again in any case.)
            record.again = status.state is not PatchState.APPLIED
            raise Gemma4CompatError(message)
        if notice is not None and notice not in self._notices:
            self._notices.add(notice)
            _warn(f"{notice} First: {status.reason}.")
        if not record.warned:
            record.warned = True
            if notice is None:
                _warn(message)


def _warn(message: str) -> None:
    warnings.warn(message, Gemma4CompatWarning, stacklevel=2)
