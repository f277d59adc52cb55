"""gate -> arm -> detect -> apply, or roll back. Knows nothing about Gemma 4.

Rules:

1. The version says *may*, the loaded code says *is*; both are needed. Below the oldest supported release the version
   says no. Beyond the newest measured release only unchanged code says yes.
2. ``applied`` is set after the last edit. A failed patch leaves no trace and never breaks the user's import, unless
   GEMMA4_COMPAT_STRICT is set: then it breaks that import, and no other. A patch whose file cannot be imported has
   failed.
3. Nothing is imported under the lock: import hooks take it, and waiting there for a module that another thread is
   importing would be a deadlock. Nothing upstream is ever imported.
4. Decisions are made under the lock; messages are emitted after its release, because a handler may raise.
5. ``status`` and ``state`` say what would be decided, and decide nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any

from gemma4_compat._engine import autoreload, detection, dormant, hooks, settings, versions
from gemma4_compat._engine.changes import ChangeSet, restore
from gemma4_compat._engine.gate import Decision, Gate
from gemma4_compat._engine.holders import reach, unreached
from gemma4_compat._engine.patch import Detection, LatePatch, Patch, PatchState, PatchStatus, Reason
from gemma4_compat._engine.reports.outbox import Outbox
from gemma4_compat._engine.reports.record import Record
from gemma4_compat._errors import Gemma4CompatError


class Engine:
    """The patches of one process. Every public method may be called from any thread, any number of times.

    Args:
        patches: the ones it applies, in this order. The file of a late patch is imported when one of its modules is.
        oldest: the oldest supported release, by distribution; nothing is applied to older ones, or beside them.
    """

    def __init__(self, patches: Iterable[Patch | LatePatch], oldest: Mapping[str, str] = versions.OLDEST) -> None:
        self._lock = threading.RLock()
        self._records = {patch.id: Record(patch) for patch in patches}
        self._gate = Gate(oldest)
        self._only: Collection[str] | None = None
        self._outbox = Outbox({name.partition(".")[0] for record in self._records.values() for name in record.modules})

    def patches(self) -> tuple[Patch, ...]:
        """All patches whose files can be imported, in the order in which they are applied."""
        for record in self._records.values():
            record.load()
        return tuple(record.patch for record in self._records.values() if record.is_loaded)

    def narrow(self, ids: Collection[str]) -> None:
        """Apply only these patches at imports from now on: this process needs no others, and will end."""
        self._only = ids

    def install(self) -> None:
        """Arm every patch that is not applied. Imported libraries are patched at once, the others on import."""
        read = settings.read(self._records)
        autoreload.arm()
        with self._locked():
            self._gate.settings = read
            for record in self._records.values():
                if record.status.state is not PatchState.APPLIED:
                    record.broken = None
                    record.enter(PatchState.PENDING, Reason.WAITING, "waiting for the import of its library")
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

    def status(self, *, count: bool = False) -> dict[str, PatchStatus]:
        """The state of every patch, by id; for pending patches, what the releases installed now decide.

        Applies nothing, warns about nothing and raises nothing.

        Args:
            count: count what the patches do not reach, which may take a search of the heap.
        """
        return self._statuses(list(self._records.values()), count=count)

    def state(self, patch_id: str, *, count: bool = False) -> PatchStatus:
        """What :meth:`status` says about one patch; no other patch's file is imported for it.

        Raises:
            Gemma4CompatError: no patch has that id.
        """
        return self._statuses([self._known(patch_id)], count=count)[patch_id]

    def _known(self, patch_id: str) -> Record:
        if not isinstance(patch_id, str) or patch_id not in self._records:
            raise Gemma4CompatError(settings.unknown_id(patch_id, self._records))
        return self._records[patch_id]

    def _statuses(self, records: list[Record], *, count: bool) -> dict[str, PatchStatus]:
        waiting = [record for record in records if record.status.state is PatchState.PENDING]
        absent = {name for name in {name for record in waiting for name in record.modules} if hooks.is_absent(name)}
        for record in records:
            record.load()
        with self._locked():
            applied = {record.id: record.changes for record in records if record.changes is not None}
            counts = unreached(applied) if count else {}
            return {record.id: self._status(record, absent, counts.get(record.id)) for record in records}

    def revert(self, patch_id: str | None = None) -> dict[str, PatchStatus]:
        """Undo one patch, or all, newest first; they stay off until :meth:`install`.

        Raises:
            Gemma4CompatError: no patch has that id.
        """
        if patch_id is not None:
            self._known(patch_id)
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
        return self.status()

    # ------------------------------------------------------------------------------------------------------ decisions

    @contextlib.contextmanager
    def _locked(self, *, raises: bool = True) -> Iterator[None]:
        """Hold the lock, and read metadata only once meanwhile: reading is slow, and the answer may change in between.

        Messages are emitted when the lock is released; with ``raises``, refusals are then errors.
        """
        with self._lock:
            self._gate.forget()
            dormant.show()
            try:
                yield
            finally:
                dormant.hide()
                messages = self._outbox.taken()
        messages.emit(raises=raises)

    def _fail_broken(self, records: Iterable[Record]) -> None:
        """Fail the patches that are wanted now but whose files could not be imported."""
        for record in records:
            if record.broken is not None and (record.again or record.status.state is PatchState.PENDING):
                record.enter(*self._broken(record)[:3])
                if record.status.state is PatchState.FAILED:
                    self._failure(record)

    def _broken(self, record: Record) -> Decision:
        if (disabled := self._gate.settings.disabled_text(record.id)) is not None:
            return Decision(PatchState.SKIPPED, Reason.DISABLED, disabled)
        return Decision(PatchState.FAILED, Reason.BROKEN_FILE, record.broken or "")

    def _on_import(self, name: str, own: bool) -> None:
        """Decide about the patches of a module that was imported or reloaded; ``own``: by the running import."""
        concerned = [record for record in self._records.values() if name in record.modules]
        if self._only is not None:
            concerned = [record for record in concerned if record.id in self._only]
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
        """Apply patches again whose functions in this module were redefined: it was executed a second time.

        What they installed elsewhere stays, also in the old classes, which may have instances.
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
                with contextlib.suppress(Exception):  # it fails again below, and is reported there
                    for target in lost:
                        record.changes.replace(
                            target.module, target.name, target.replacement, attribute=target.attribute
                        )
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
                record.enter(PatchState.PENDING, Reason.WAITING, detection.waiting(record.patch, trigger))
        reach(record.changes for record in waited)

    def _ready(self, patch: Patch, ending: str | None = None) -> frozenset[str]:
        """The groups of targets whose modules are all imported; ``ending``: the module whose import this thread ends.

        Only that thread may count it: at the end of an import Python takes the module out of sys.modules for a moment.
        """
        return frozenset(
            group
            for group, modules in patch.groups.items()
            if all(name == ending or hooks.is_imported(name) for name in modules)
        )

    def _fail_hopeless(self, absent: set[str]) -> None:
        """Fail the patches that wait for a module which the loaded release lacks.

        Import hooks do not look for them: searching the disk would cost too much there.
        """
        for record in self._records.values() if absent else ():
            if (found := self._hopeless(record, absent)) is not None:
                record.enter(*found[:3], versions=found.versions, detection=Detection.UNKNOWN)
                record.again = True  # in case the module is created after all
                self._failure(record)

    def _hopeless(self, record: Record, absent: set[str]) -> Decision | None:
        """Why a waiting patch has failed; None unless each of its groups needs one of these modules."""
        if not record.is_loaded or record.status.state is not PatchState.PENDING:
            return None
        patch = record.patch
        gone = [
            next((name for name in modules if name in absent and not hooks.is_imported(name)), None)
            for modules in patch.groups.values()
        ]
        if None in gone or (decided := self._gate.decide(patch)).state is not PatchState.PENDING:
            return None
        reason = detection.absent(patch, decided.versions, str(gone[0]))
        return Decision(PatchState.FAILED, Reason.MODULE_ABSENT, reason, decided.versions)

    def _decide(self, record: Record, ready: frozenset[str], *, late: bool) -> None:
        patch = record.patch
        record.again = False
        found = None
        state, code, reason, releases = self._gate.decide(patch)
        if state is PatchState.PENDING:
            edits = ChangeSet(patch.id)
            try:
                self._gate.check_loaded(patch)
                found = detection.detect(patch, ready, releases)
                code, reason = found.code, found.reason
                if found.detection is Detection.AFFECTED:
                    with self._uncovered(record):
                        try:
                            detection.apply(patch, found.groups, edits, late=late)
                        except BaseException:
                            edits.undo()  # before what covers it comes back
                            raise
                    record.changes, record.groups = edits, found.groups
                    state, reason = PatchState.APPLIED, detection.applied(patch, releases, found)
                elif found.detection is Detection.NOT_AFFECTED:
                    state = PatchState.NOT_NEEDED
                else:
                    state = PatchState.FAILED
            except Exception as error:  # broad: whatever goes wrong must not break the user's import
                edits.undo()
                state, reason, found = PatchState.FAILED, f"{type(error).__name__}: {error}", None
                code = Reason.UPGRADED if isinstance(error, Gemma4CompatError) else Reason.ERROR
                if code is Reason.ERROR and detection.is_unmeasured(patch, releases):
                    found = detection.Found(Detection.UNKNOWN, code)
                    reason = f"{detection.unmeasured('unknown', patch, releases)}: {reason}"
        applied = state is PatchState.APPLIED
        said = None if found is None else found.detection
        record.enter(state, code, reason, versions=releases, late=late and applied, detection=said)
        for name in releases:
            self._outbox.two_copies(name, self._gate.copies(name))
        if code is Reason.TOO_OLD:
            self._outbox.too_old(record, self._gate.oldest, strict=self._gate.settings.strict)
        if state is PatchState.FAILED:
            record.again = ready != patch.groups.keys()  # another group of it may be known
            self._failure(record, found)
        elif applied and found is not None and found.reason:
            self._failure(record, found)

    def _revert(self, record: Record, elsewhere: list[tuple[FunctionType, Any]] | None = None) -> None:
        record.again = False
        if record.changes is None:
            # A patch that this release does not need stays not needed.
            if record.status.state is PatchState.PENDING and (
                not record.is_loaded or self._gate.decide(record.patch).state is PatchState.PENDING
            ):
                reason = "reverted before it was applied; install() arms it again"
                record.enter(PatchState.REVERTED, Reason.REVERTED, reason)
            return
        with self._uncovered(record):
            left = record.changes.undo(elsewhere)
            record.changes = None
        reason = "reverted; install() applies it again"
        if left:
            reason += (
                f" ({', '.join(left)}: replaced by another library since, so ours stays below it and passes through)"
            )
        record.enter(PatchState.REVERTED, Reason.REVERTED, reason, versions=record.status.versions)

    def _failure(self, record: Record, found: detection.Found | None = None) -> None:
        notice = None if found is None else found.notice
        key = f"library {found.library}" if found is not None and found.library else notice
        self._outbox.failure(record, notice, key, strict=self._gate.settings.strict)

    @contextlib.contextmanager
    def _uncovered(self, record: Record) -> Iterator[None]:
        """Inside, later patches that replace the same functions are off: the ones on top must come off first.

        The same applies to patches on top of these, on their other functions.
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
                    reason = f"{type(error).__name__}: {error}"
                    other.enter(PatchState.FAILED, Reason.ERROR, reason, versions=other.status.versions)
                    self._failure(other)
            reach(other.changes for other in covering)

    # --------------------------------------------------------------------------------------------------- what is said

    def _status(self, record: Record, absent: set[str], holders: int | None) -> PatchStatus:
        status = record.status
        if status.state is PatchState.PENDING:
            return self._pending(record, absent)
        if record.changes is None:
            return status
        code, reason = status.reason_code, status.reason
        if overridden := record.changes.overridden():
            reason += f"; replaced by another library since: {', '.join(overridden)}"
        if holders:
            reason += f"; places that took what it replaces before, and call the original: {holders}"
        if unmet := tuple(name for name in record.patch.needs if self._is_off(name)):
            code = Reason.NEEDS
            reason += (
                f"; not exact without {', '.join(f'{name} ({self._records[name].status.state})' for name in unmet)}"
            )
        said = dataclasses.replace(status, reason_code=code, reason=reason, unreached=holders)
        return dataclasses.replace(said, overridden=overridden, unmet=unmet)

    def _pending(self, record: Record, absent: set[str]) -> PatchStatus:
        """What will happen to a pending patch, as far as that is known."""
        detected = None
        if not record.is_loaded:
            decided = self._broken(record)
        elif (hopeless := self._hopeless(record, absent)) is not None:
            decided, detected = hopeless, Detection.UNKNOWN
        else:
            decided = self._gate.decide(record.patch)
            if decided.state is PatchState.PENDING and self._ready(record.patch):
                reason = "its library is imported, by an import that began before install(); install() applies it now"
                decided = decided._replace(code=Reason.ARMED, reason=reason)
            elif decided.state is PatchState.PENDING:
                decided = decided._replace(reason=detection.waiting(record.patch))
        state, code, reason, releases = decided
        said = dataclasses.replace(record.status, state=state, reason_code=code, reason=reason, versions=releases)
        return dataclasses.replace(said, detection=detected)

    def _is_off(self, patch_id: str) -> bool:
        """Whether a patch is off that could be on. Without its library, or without the defect, it is not missing."""
        record = self._records.get(patch_id)
        if record is None:  # an engine with some of the patches
            return False
        off = record.status.state in (PatchState.FAILED, PatchState.REVERTED)
        return off or record.status.reason_code is Reason.DISABLED
