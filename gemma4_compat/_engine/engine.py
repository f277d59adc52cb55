"""gate -> arm -> detect -> apply, or roll back. Knows nothing about Gemma 4.

Rules:

1. The version says *may*, the loaded code says *is*; both are needed. Below the oldest supported release the version
   says no; beyond the newest measured one only code that has not changed since says yes.
2. ``applied`` is set after the last edit. A failed patch leaves no trace and never breaks the user's import, unless
   GEMMA4_COMPAT_STRICT asks for that: then it breaks that import, and no other. One whose file cannot be imported is a
   failed patch.
3. Nothing is imported under the lock: it is taken inside import hooks, and waiting there for a module that another
   thread is importing would be a deadlock. Nothing upstream is imported at all.
4. Decisions are made under the lock; messages follow after its release, because a handler may raise.
5. Asking changes nothing: ``status`` says what would be decided, and decides nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any

from gemma4_compat._engine import autoreload, detection, hooks, notice, report, settings, sleep, versions
from gemma4_compat._engine.changes import ChangeSet, reach, restore, unreached
from gemma4_compat._engine.gate import Gate
from gemma4_compat._engine.patch import Detection, LatePatch, Patch, PatchState, PatchStatus
from gemma4_compat._engine.record import Record
from gemma4_compat._errors import Gemma4CompatError


class Engine:
    """The patches of one process. Every public method may be called from any thread, any number of times.

    Args:
        patches: what it applies, in this order. The file of a late one is imported when a module of it is.
        oldest: the oldest supported release, by distribution; nothing is applied to, or together with, older ones.
    """

    def __init__(self, patches: Iterable[Patch | LatePatch], oldest: Mapping[str, str] = versions.OLDEST) -> None:
        self._lock = threading.RLock()
        self._records = {patch.id: Record(patch) for patch in patches}
        self._gate = Gate(oldest)
        self._two_copies: set[str] = set()  # distributions already warned about
        self._too_old: set[str] = set()  # the same
        self._notices: set[str] = set()  # what was said of many patches
        self._warnings: list[str] = []  # to be said when the lock is released
        self._refusals: list[str] = []  # the same; errors, where GEMMA4_COMPAT_STRICT is set
        self._libraries = {name.partition(".")[0] for record in self._records.values() for name in record.modules}

    def patches(self) -> tuple[Patch, ...]:
        """All patches, in the order in which they are applied, but for those whose file cannot be imported."""
        for record in self._records.values():
            record.load()
        return tuple(record.patch for record in self._records.values() if record.is_loaded)

    def install(self) -> None:
        """Arm every patch that is not applied. What is imported already is patched at once, the rest on import."""
        read = settings.read(self._records)
        autoreload.arm()
        with self._locked():
            self._gate.settings = read
            for record in self._records.values():
                if record.status.state is not PatchState.APPLIED:
                    record.broken = None
                    record.enter(PatchState.PENDING, "waiting for the import of its library")
        # Not under the lock, which hooks take. A module that is complete after this is found below; for any other,
        # _on_import will be called. So the last thread to decide leaves no patch pending whose modules are imported.
        modules = dict.fromkeys(name for record in self._records.values() for name in sorted(record.modules))
        for name in modules:
            hooks.when_imported(name, self._on_import)
        there = {name for name in modules if hooks.is_imported(name)}
        for name in there:
            hooks.seen(name, self._on_import)
        absent = {name for name in modules if name not in there and hooks.is_absent(name)}
        for record in self._records.values():
            if record.modules & (there | absent):
                record.load()
        with self._locked():
            self._fail_broken(self._records.values())
            for name in there:
                self._apply_again(name, reloaded=False)
            self._apply_ready(late=True)
            self._fail_hopeless(absent)

    def status(self, *, count: bool = True) -> dict[str, PatchStatus]:
        """Where every patch is, by id. For patches still waiting, what the releases installed now say of them.

        Applies nothing, warns of nothing and raises nothing. ``count``: look for what a patch does not reach, which
        can take a search of the heap.
        """
        waiting = [record for record in self._records.values() if record.status.state is PatchState.PENDING]
        absent = {name for name in {name for record in waiting for name in record.modules} if hooks.is_absent(name)}
        for record in self._records.values():
            record.load()
        with self._locked():
            records = self._records.values()
            counted = {record.id: record.changes for record in records if count and record.changes is not None}
            counts = unreached(counted)
            return {record.id: self._status(record, absent, counts.get(record.id, 0)) for record in records}

    def revert(self, patch_id: str | None = None) -> dict[str, PatchStatus]:
        """Undo one patch, or all, newest first; off until :meth:`install`. The status has ``unreached`` 0: no search.

        Raises:
            Gemma4CompatError: no patch has that id.
        """
        if patch_id is not None and patch_id not in self._records:
            raise Gemma4CompatError(settings.unknown_id(patch_id, self._records))
        for record in self._records.values():
            if patch_id in (None, record.id):
                record.load()
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
        return self.status(count=False)

    # ------------------------------------------------------------------------------------------------------ decisions

    @contextlib.contextmanager
    def _locked(self, *, raises: bool = True) -> Iterator[None]:
        """Metadata is read once while the lock is held: it is slow to read, and may be another the next time.

        What is to be said, is said when the lock is released; with ``raises``, refusals are errors.
        """
        with self._lock:
            self._gate.forget()
            sleep.show()
            try:
                yield
            finally:
                sleep.hide()
                warnings, refusals, self._warnings, self._refusals = self._warnings, self._refusals, [], []
        for message in warnings if raises else [*warnings, *refusals]:
            notice.warn(message, self._libraries)
        if raises and refusals:
            raise Gemma4CompatError("\n".join(dict.fromkeys(refusals)))

    def _fail_broken(self, records: Iterable[Record]) -> None:
        """Patches whose files could not be imported, and are wanted now."""
        for record in records:
            if record.broken is not None and (record.again or record.status.state is PatchState.PENDING):
                record.enter(*self._broken(record))
                if record.status.state is PatchState.FAILED:
                    self._report_failure(record)

    def _broken(self, record: Record) -> tuple[PatchState, str]:
        if record.id in self._gate.settings.disabled:
            return PatchState.SKIPPED, self._gate.disabled
        return PatchState.FAILED, record.broken or ""

    def _on_import(self, name: str, own: bool) -> None:
        """A module is imported, or reloaded; ``own``: by the import that is going on."""
        concerned = [record for record in self._records.values() if name in record.modules]
        for record in concerned:
            record.load()
        others = {other for record in concerned for other in record.modules} - {name}
        if hooks.is_initializing(name) and not all(map(hooks.is_imported, others)):
            hooks.at_end(name, self._on_import)  # until then no other thread counts it as imported
        with self._locked(raises=own):
            self._fail_broken(concerned)
            self._apply_again(name, reloaded=True)
            self._regroup(name)
            self._apply_ready(late=not own, trigger=name)

    def _regroup(self, name: str) -> None:
        """Decide again about patches that were applied without the groups of this module."""
        for record in self._records.values():
            if record.changes is None or name not in record.modules:
                continue
            groups = record.patch.groups
            if not any(name in groups[group] for group in record.groups):
                with self._uncovered(record):
                    record.changes.undo()
                    record.changes = None
                self._decide(record, self._ready(record.patch, name), late=record.status.late)

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
                self._decide(record, self._ready(record.patch, name), late=record.status.late)

    def _apply_ready(self, *, late: bool, trigger: str | None = None) -> None:
        """Decide waiting patches whose modules are all there; with ``trigger``, those that need that module."""
        waited: list[Record] = []
        for record in self._records.values():
            waits = (record.again and trigger) or record.status.state is PatchState.PENDING
            if not waits or not record.is_loaded or (trigger and trigger not in record.patch.modules):
                continue
            if ready := self._ready(record.patch, trigger):
                self._decide(record, ready, late=late)
                waited += [record] if late or len(record.modules) > 1 else []
            else:
                record.enter(PatchState.PENDING, detection.waiting(record.patch, trigger))
        reach(record.changes for record in waited)

    def _ready(self, patch: Patch, ending: str | None = None) -> frozenset[str]:
        """The groups of targets whose modules are all there; ``ending``: the module whose import this thread ends.

        Only that thread may count it: at the end of an import Python takes the module out of sys.modules for a moment.
        """
        return frozenset(
            group
            for group, modules in patch.groups.items()
            if all(name == ending or hooks.is_imported(name) for name in modules)
        )

    def _fail_hopeless(self, absent: set[str]) -> None:
        """Patches that wait for a module which the loaded release does not have: say so, instead of waiting on.

        Looked for where somebody asks, and not in import hooks, where a search of the disk costs too much.
        """
        for record in self._records.values() if absent else ():
            if (found := self._hopeless(record, absent)) is not None:
                reason, releases = found
                record.enter(PatchState.FAILED, reason, versions=releases, detection=Detection.UNKNOWN)
                record.again = True  # should it be made after all
                self._report_failure(record)

    def _hopeless(self, record: Record, absent: set[str]) -> tuple[str, dict[str, str]] | None:
        """Reason and releases, where every group of a waiting patch needs one of these modules."""
        if not record.is_loaded or record.status.state is not PatchState.PENDING:
            return None
        patch = record.patch
        gone = [
            next((name for name in modules if name in absent and not hooks.is_imported(name)), None)
            for modules in patch.groups.values()
        ]
        if None in gone:
            return None
        state, _, releases = self._gate.decide(patch)
        if state is not PatchState.PENDING:
            return None
        what = f"module {gone[0]} does not exist in {patch.distribution} {releases[patch.distribution]}"
        return detection.explained(patch, releases, what), releases

    def _decide(self, record: Record, ready: frozenset[str], *, late: bool) -> None:
        patch = record.patch
        record.again = False
        found = None
        state, reason, releases = self._gate.decide(patch)
        if state is PatchState.PENDING:
            edits = ChangeSet(patch.id)
            try:
                self._gate.check_loaded(patch)
                found = detection.detect(patch, ready, releases)
                reason = found.reason
                if found.detection is Detection.AFFECTED:
                    with self._uncovered(record):
                        try:
                            detection.apply(patch, found.groups, edits, late=late)
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
        self._warn_two_copies(releases)
        if state is PatchState.SKIPPED:
            self._report_too_old(record)
        notice = None if found is None else found.notice
        if state is PatchState.FAILED:
            record.again = ready != patch.groups.keys()  # another group of it may be known
            self._report_failure(record, notice)
        elif applied and found is not None and found.reason:
            self._report_failure(record, notice)

    def _warn_two_copies(self, names: Iterable[str]) -> None:
        for name in names:
            found = self._gate.copies(name)
            if len(set(found.values())) > 1 and name not in self._two_copies:
                self._two_copies.add(name)
                listed = ", ".join(f"{version} in {folder}" for folder, version in found.items())
                self._warnings.append(
                    f"several releases of {name} are on sys.path: {listed}. Python uses the first; remove the others."
                )

    def _revert(self, record: Record, elsewhere: list[tuple[FunctionType, Any]] | None = None) -> None:
        record.again = False
        if record.changes is None:
            # One that waits for a module it will never need, on this release, stays not needed.
            if record.status.state is PatchState.PENDING and (
                not record.is_loaded or self._gate.decide(record.patch)[0] is PatchState.PENDING
            ):
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
        elsewhere: list[Any] = []
        for other in reversed(covering):
            assert other.changes is not None
            other.changes.undo(elsewhere)
        restore(elsewhere)  # one search for all
        try:
            yield
        finally:
            for other in covering:
                other.changes = ChangeSet(other.id)
                try:
                    detection.apply(other.patch, other.groups, other.changes, late=other.status.late)
                except Exception as error:
                    other.changes.undo()
                    other.changes = None
                    other.enter(PatchState.FAILED, f"{type(error).__name__}: {error}", versions=other.status.versions)
                    self._report_failure(other)
            reach(other.changes for other in covering)

    # --------------------------------------------------------------------------------------------------- what is said

    def _status(self, record: Record, absent: set[str], holders: int) -> PatchStatus:
        status = record.status
        if status.state is PatchState.PENDING:
            return self._pending(record, absent)
        if record.changes is None:
            return status
        reason = status.reason
        if overridden := record.changes.overridden():
            reason += f"; replaced by another library since: {', '.join(overridden)}"
        if holders:
            reason += f"; places that took what it replaces before, and call the original: {holders}"
        if unmet := tuple(name for name in record.patch.needs if self._is_off(name)):
            reason += (
                f"; not exact without {', '.join(f'{name} ({self._records[name].status.state})' for name in unmet)}"
            )
        return dataclasses.replace(status, reason=reason, overridden=overridden, unmet=unmet, unreached=holders)

    def _pending(self, record: Record, absent: set[str]) -> PatchStatus:
        """What will become of a patch that waits, as far as that can be told."""
        if not record.is_loaded:
            state, reason = self._broken(record)
            return dataclasses.replace(record.status, state=state, reason=reason)
        if (hopeless := self._hopeless(record, absent)) is not None:
            reason, releases = hopeless
            failed = dataclasses.replace(record.status, state=PatchState.FAILED, reason=reason, versions=releases)
            return dataclasses.replace(failed, detection=Detection.UNKNOWN)
        state, reason, releases = self._gate.decide(record.patch)
        if state is PatchState.PENDING:
            reason = detection.waiting(record.patch)
            if self._ready(record.patch):
                reason = "its library is imported, by an import that began before install(); install() applies it now"
        return dataclasses.replace(record.status, state=state, reason=reason, versions=releases)

    def _is_off(self, patch_id: str) -> bool:
        """Whether a patch is off that could be on. One whose library is absent, or has no defect, is not missed."""
        record = self._records.get(patch_id)
        if record is None:  # an engine with some of the patches
            return False
        skipped = record.status.state is PatchState.SKIPPED and record.id in self._gate.settings.disabled
        return skipped or record.status.state in (PatchState.FAILED, PatchState.REVERTED)

    def _report_too_old(self, record: Record) -> None:
        """Once a library, when it is loaded: an old one that is only installed harms nobody."""
        for name, version in record.status.versions.items():
            too_old = versions.too_old(name, version, self._gate.oldest)
            if record.status.reason != too_old or not versions.is_loaded(name):
                continue
            message = f"{too_old}. Nothing that concerns it is repaired; GEMMA4_COMPAT_DISABLE=all silences this."
            if self._gate.settings.strict:
                record.again = True  # see _report_failure
                self._refusals.append(message)
            elif name not in self._too_old:
                self._too_old.add(name)
                self._warnings.append(message)
            return

    def _report_failure(self, record: Record, notice: str | None = None) -> None:
        """Once a patch; or, where one cause keeps many off, the ``notice`` of it, once for all."""
        status = record.status
        message = report.failure_text(status, record.patch.first_symptom if record.is_loaded else "")
        if self._gate.settings.strict:
            # It makes the import fail; the same import, tried again, must not succeed unpatched.
            # (Of one that is applied in part, the group that is missing is looked at again in any case.)
            record.again = status.state is not PatchState.APPLIED
            self._refusals.append(message)
        elif not record.warned and notice not in self._notices:
            self._warnings.append(notice or message)
        record.warned = True
        if notice is not None:
            self._notices.add(notice)
