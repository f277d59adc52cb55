"""What an engine says: collected under its lock, emitted after its release, because a handler may raise."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from gemma4_compat._engine import versions
from gemma4_compat._engine.io import notice
from gemma4_compat._engine.patch import PatchState
from gemma4_compat._engine.reports import report
from gemma4_compat._engine.reports.record import Record
from gemma4_compat._errors import Gemma4CompatError


class Outbox:
    """Warnings, and refusals, which GEMMA4_COMPAT_STRICT turns into errors. Nothing is said twice.

    Args:
        libraries: warnings point at the line outside these packages that led to them.
    """

    def __init__(self, libraries: Collection[str]) -> None:
        self._libraries = libraries
        self._warnings: list[str] = []
        self._refusals: list[str] = []
        self._said: set[str] = set()  # distributions with several copies or too old ones, and notices

    def failure(self, record: Record, shared: str | None, key: str | None, *, strict: bool) -> None:
        """Report a failed patch once; or ``shared`` once for a ``key``: the message if one cause keeps many off."""
        status = record.status
        message = report.failure_text(status, record.patch.first_symptom if record.is_loaded else "")
        if strict:
            # The import fails; the same import, tried again, must not succeed unpatched. (If the patch is applied in
            # part, the missing group is looked at again in any case.)
            record.again = status.state is not PatchState.APPLIED
            self._refusals.append(message)
        elif not record.warned and key not in self._said:
            self._warnings.append(shared or message)
        record.warned = True
        if key is not None:
            self._said.add(key)

    def too_old(self, record: Record, oldest: Mapping[str, str], *, strict: bool) -> None:
        """Report the library that is too old once, when it is loaded: one that is only installed does no harm."""
        seen = record.status.versions.items()
        name = next(name for name, version in seen if versions.too_old(name, version, oldest) is not None)
        if not versions.is_loaded(name):
            return
        message = (
            f"{record.status.reason}. Nothing that concerns it is repaired; GEMMA4_COMPAT_DISABLE=all silences this."
        )
        if strict:
            record.again = True  # see failure()
            self._refusals.append(message)
        elif f"old {name}" not in self._said:
            self._said.add(f"old {name}")
            self._warnings.append(message)

    def two_copies(self, name: str, copies: Mapping[str, str]) -> None:
        """Warn once if several releases of a distribution are installed; ``copies``: folder -> release."""
        if len(set(copies.values())) > 1 and f"copies {name}" not in self._said:
            self._said.add(f"copies {name}")
            listed = ", ".join(f"{version} in {folder}" for folder, version in copies.items())
            self._warnings.append(
                f"several releases of {name} are on sys.path: {listed}. Python uses the first; remove the others."
            )

    def taken(self) -> Outbox:
        """Remove and return what was collected so far. Call it under the lock."""
        taken = Outbox(self._libraries)
        taken._warnings, self._warnings = self._warnings, []
        taken._refusals, self._refusals = self._refusals, []
        return taken

    def emit(self, *, raises: bool) -> None:
        """Emit the warnings, and raise the refusals, or emit those as warnings as well. Call it without the lock.

        Raises:
            Gemma4CompatError: there are refusals, and ``raises`` is set.
        """
        for message in self._warnings if raises else [*self._warnings, *self._refusals]:
            notice.warn(message, self._libraries)
        if raises and self._refusals:
            raise Gemma4CompatError("\n".join(dict.fromkeys(self._refusals)))
