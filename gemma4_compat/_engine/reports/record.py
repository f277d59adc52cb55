"""One patch in this process: its file, once it is imported, and its status."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType

from gemma4_compat._engine import changes
from gemma4_compat._engine.patch import Detection, LatePatch, Patch, PatchState, PatchStatus, Reason


class Record:
    """One patch in this process.

    Attributes:
        id: the patch.
        modules: those of all its targets.
        changes: its edits, while it is applied.
        groups: the groups of targets that are applied.
        warned: whether the user was told that it failed.
        again: decide again at the next import of one of its modules, whatever its state.
        broken: why its file cannot be imported.
    """

    def __init__(self, source: Patch | LatePatch) -> None:
        self.id = source.id
        self._source = source
        self._patch = source if isinstance(source, Patch) else None
        modules = [target.module for target in source.targets] if isinstance(source, Patch) else source.modules
        self.modules = frozenset(modules)
        self.changes: changes.ChangeSet | None = None
        self.groups: frozenset[str] = frozenset()
        self.warned = False
        self.again = False
        self.broken: str | None = None
        self.enter(PatchState.REGISTERED, Reason.NOT_ARMED, "known, not armed yet; gemma4_compat.install() arms it")

    @property
    def is_loaded(self) -> bool:
        """Whether the file of the patch is imported."""
        return self._patch is not None

    @property
    def patch(self) -> Patch:
        """The patch.

        Raises:
            LookupError: its file is not imported.
        """
        if self._patch is None:
            raise LookupError(f"the file of {self.id} is not imported")
        return self._patch

    def load(self) -> None:
        """Import the file of the patch, unless that was tried before. Never call this under the engine's lock."""
        if self._patch is None and self.broken is None and isinstance(self._source, LatePatch):
            try:
                self._patch = self._source.load()
            except Exception as error:  # broad: one broken file must not break the user's import
                self.broken = f"its file cannot be imported: {type(error).__name__}: {error}"

    def enter(
        self,
        state: PatchState,
        code: Reason,
        reason: str,
        *,
        versions: Mapping[str, str] | None = None,
        late: bool = False,
        detection: Detection | None = None,
    ) -> None:
        """Put the patch into a state, now."""
        self.status = PatchStatus(
            id=self.id,
            state=state,
            reason_code=code,
            reason=reason,
            versions=MappingProxyType(dict(versions or {})),
            late=late,
            detection=detection,
            at=time.time(),
        )
