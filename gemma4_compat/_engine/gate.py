"""What settings and versions alone decide about a patch, before its library's code is looked at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from gemma4_compat._engine import versions
from gemma4_compat._engine.patch import Patch, PatchState
from gemma4_compat._engine.settings import Settings
from gemma4_compat._errors import Gemma4CompatError

_T = TypeVar("_T")
#: How the reason begins where another library's release is free of the defect.
ONLY_WITH = "only needed with"


class Gate:
    """Metadata of what is installed is read once: it is slow to read, and may be another the next time.

    Args:
        oldest: the oldest supported release, by distribution; nothing is applied to, or together with, older ones.
    """

    def __init__(self, oldest: Mapping[str, str]) -> None:
        self.oldest = oldest
        self.settings = Settings()
        self._metadata: dict[tuple[Callable[[str], Any], str], Any] = {}

    @property
    def disabled(self) -> str:
        """Why a patch is off that somebody has turned off."""
        return f"disabled by {self.settings.disabled_by}"

    def forget(self) -> None:
        """Read metadata anew from now on."""
        self._metadata.clear()

    def copies(self, name: str) -> dict[str, str]:
        """The releases of a distribution on sys.path, by folder."""
        return self._read(versions.copies, name)

    def decide(self, patch: Patch) -> tuple[PatchState, str, dict[str, str]]:
        """State, reason and the releases that count. PENDING means: nothing against it."""
        requirements = [versions.requirement(text) for text in patch.requires]
        names = [patch.distribution, *(name for name, _ in requirements)]
        # The loaded one counts, else the installed one.
        current = {name: versions.loaded(name) or self._read(versions.installed, name) for name in names}
        releases = {name: version for name, version in current.items() if version is not None}
        if patch.id in self.settings.disabled:
            return PatchState.SKIPPED, self.disabled, releases
        for name in names:
            if name not in releases:
                return PatchState.SKIPPED, f"{name} is not installed", releases
        for name in names:
            if (too_old := versions.too_old(name, releases[name], self.oldest)) is not None:
                return PatchState.SKIPPED, too_old, releases
        version = releases[patch.distribution]
        if not versions.admits(patch.affected, version):
            fixed = f" (fixed in {patch.fixed})" if patch.fixed else ""
            reason = f"{patch.distribution} {version} is outside {patch.affected}{fixed}"
            return PatchState.NOT_NEEDED, reason, releases
        for name, specifier in requirements:
            if not versions.admits(specifier, releases[name]):
                reason = f"{ONLY_WITH} {name}{specifier}; {name} is {releases[name]}"
                return PatchState.SKIPPED, reason, releases
        return PatchState.PENDING, "", releases

    def check_loaded(self, patch: Patch) -> None:
        """Refuse what is loaded in another release than is installed.

        Raises:
            Gemma4CompatError: it is.
        """
        for name in [patch.distribution, *(versions.requirement(text)[0] for text in patch.requires)]:
            loaded, installed = versions.loaded(name), self._read(versions.installed, name)
            if loaded and installed and versions.differ(loaded, installed):
                raise Gemma4CompatError(
                    f"{name} {loaded} is loaded but {installed} is installed now (upgraded while Python was "
                    "running?); restart Python"
                )

    def _read(self, look_up: Callable[[str], _T], name: str) -> _T:
        key = (look_up, name)
        if key not in self._metadata:
            self._metadata[key] = look_up(name)
        value: _T = self._metadata[key]
        return value
