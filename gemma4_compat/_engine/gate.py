"""What settings and versions decide about a patch, before its library's code is looked at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from gemma4_compat._engine import versions
from gemma4_compat._engine.patch import Patch, PatchState, Reason
from gemma4_compat._engine.settings import Settings
from gemma4_compat._errors import Gemma4CompatError

_T = TypeVar("_T")


class Decision(NamedTuple):
    """A state and why, as code and in words, with the releases that count. PENDING means: nothing against it."""

    state: PatchState
    code: Reason
    reason: str = ""
    versions: Mapping[str, str] = MappingProxyType({})


class Gate:
    """What is installed, read once for several decisions: reading is slow, and the answer may change in between.

    Args:
        oldest: the oldest supported release, by distribution; nothing is applied to, or together with, older ones.
    """

    def __init__(self, oldest: Mapping[str, str]) -> None:
        self.oldest = oldest
        self.settings = Settings()
        self._metadata: dict[tuple[Callable[[str], Any], str], Any] = {}

    def forget(self) -> None:
        """Read the metadata again from now on."""
        self._metadata.clear()

    def copies(self, name: str) -> dict[str, str]:
        """The releases of a distribution on sys.path, by folder."""
        return self._read(versions.copies, name)

    def decide(self, patch: Patch) -> Decision:
        """Decide about one patch; PENDING: its library's code decides the rest."""
        requirements = [versions.requirement(text) for text in patch.requires]
        names = [patch.distribution, *(name for name, _ in requirements)]
        # The loaded release counts, else the installed one.
        current = {name: versions.loaded(name) or self._read(versions.installed, name) for name in names}
        releases = {name: version for name, version in current.items() if version is not None}
        if (disabled := self.settings.disabled_text(patch.id, patch.kind)) is not None:
            return Decision(PatchState.SKIPPED, Reason.DISABLED, disabled, releases)
        for name in names:
            if name not in releases:
                return Decision(PatchState.SKIPPED, Reason.NOT_INSTALLED, f"{name} is not installed", releases)
        for name in names:
            if (too_old := versions.too_old(name, releases[name], self.oldest)) is not None:
                return Decision(PatchState.SKIPPED, Reason.TOO_OLD, too_old, releases)
        version = releases[patch.distribution]
        if not versions.admits(patch.affected, version):
            fixed = f" (fixed in {patch.fixed})" if patch.fixed else ""
            reason = f"{patch.distribution} {version} is outside {patch.affected}{fixed}"
            return Decision(PatchState.NOT_NEEDED, Reason.OUT_OF_RANGE, reason, releases)
        for name, specifier in requirements:
            if not versions.admits(specifier, releases[name]):
                reason = f"only needed with {name}{specifier}; {name} is {releases[name]}"
                return Decision(PatchState.SKIPPED, Reason.ONLY_WITH, reason, releases)
        return Decision(PatchState.PENDING, Reason.WAITING, "", releases)

    def check_loaded(self, patch: Patch) -> None:
        """Refuse a library that was upgraded while it is loaded.

        Raises:
            Gemma4CompatError: another release is installed than is loaded.
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
