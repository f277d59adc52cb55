"""What is on and off: the environment variables GEMMA4_COMPAT_DISABLE, GEMMA4_COMPAT_ENABLE and GEMMA4_COMPAT_STRICT;
for those that are not set, the table ``[tool.gemma4_compat]`` of the project.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gemma4_compat._engine.io import arguments, notice, project
from gemma4_compat._engine.patch import Kind

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"", "0", "false", "no", "off"})
_DISABLE, _ENABLE, _STRICT = (f"GEMMA4_COMPAT_{name}" for name in ("DISABLE", "ENABLE", "STRICT"))


@dataclass(frozen=True)
class Settings:
    """The settings of a process. ``disabled`` wins over ``enabled``.

    Attributes:
        disabled: ids of patches that are switched off.
        kinds: kinds of patches that are switched off.
        enabled: ids of patches whose opt-in holds for the whole process.
        strict: a patch that cannot apply is an error.
        disabled_by: the variable, or the file and its key, that says what is off.
    """

    disabled: frozenset[str] = frozenset()
    kinds: frozenset[Kind] = frozenset()
    enabled: frozenset[str] = frozenset()
    strict: bool = False
    disabled_by: str = _DISABLE

    def disabled_text(self, patch_id: str, kind: Kind | None = None) -> str | None:
        """Why a patch of this kind (None: unknown) is switched off, in words; None if it is not."""
        if patch_id in self.disabled:
            return f"disabled by {self.disabled_by}"
        if kind in self.kinds:
            return f"disabled by {self.disabled_by}, with all others of the kind {kind}"
        return None


#: The project, as it was read last; the working directory may have changed since.
_project: project.Project | None = None


def read(known: Collection[str], environ: Mapping[str, str] | None = None) -> Settings:
    """Settings of the environment and the project. A variable that is set, even to "", wins over the file.

    Unknown ids, and values of variables that make no sense, are ignored, each with one warning that names the remedy.

    Args:
        known: ids of the patches.
        environ: the variables; default: those of this process.

    Raises:
        Gemma4CompatError: the file has a value that makes no sense.
    """
    global _project
    environ = os.environ if environ is None else environ
    _project = found = project.read()
    disable, by = _asked(_DISABLE, environ, found)
    enable, enabled_by = _asked(_ENABLE, environ, found)
    strict = _flag(_STRICT, environ) if _STRICT in environ or found is None else bool(found.strict)
    ids, kinds = _ids(by, disable, known, kinds=True)
    return Settings(
        disabled=ids,
        kinds=kinds,
        enabled=_ids(enabled_by, enable, known, kinds=False)[0],
        strict=strict,
        disabled_by=by,
    )


def project_file() -> Path | None:
    """The pyproject.toml whose settings count where no variable is set; None if no file has settings."""
    return None if _project is None else _project.file


def is_enabled(patch_id: str, environ: Mapping[str, str] | None = None) -> bool:
    """Whether GEMMA4_COMPAT_ENABLE, or the project, names the patch now. :func:`read` warns of unknown ids."""
    return patch_id in enabled(environ)[0]


def enabled(environ: Mapping[str, str] | None = None) -> tuple[Sequence[str], str]:
    """The patches that GEMMA4_COMPAT_ENABLE, or the project, names now, and which of the two does."""
    return _asked(_ENABLE, os.environ if environ is None else environ, _project)


_EVERY_ID = "`gemma4-compat list --verbose` shows every id."


def unknown_id(patch_id: str, known: Collection[str]) -> str:
    """One sentence about an id that no patch has, with the nearest id that exists."""
    if not isinstance(patch_id, str):
        return f"{arguments.shown(patch_id)} is not the id of a patch, a string; {_EVERY_ID}"
    close = nearest(patch_id, known)
    hint = f"did you mean {close!r}?" if close else _EVERY_ID
    return f"no patch has the id {patch_id!r}; {hint}"


def nearest(name: str, known: Collection[str]) -> str | None:
    """The known name that is closest to a misspelt one; None if no name is close."""
    import difflib

    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.4)), None)


def _asked(variable: str, environ: Mapping[str, str], found: project.Project | None) -> tuple[Sequence[str], str]:
    """The names that a setting lists, and where it does."""
    if variable not in environ and found is not None:
        key = variable.removeprefix("GEMMA4_COMPAT_").lower()
        listed = found.disable if variable == _DISABLE else found.enable
        if listed is not None:
            return listed, f"{found.file}: tool.gemma4_compat.{key}"
    return [item.strip() for item in environ.get(variable, "").split(",") if item.strip()], variable


def _ids(
    where: str, asked: Sequence[str], known: Collection[str], *, kinds: bool
) -> tuple[frozenset[str], frozenset[Kind]]:
    """The ids and kinds among the names that are asked for; with ``kinds``, kinds and "all" count."""
    chosen: set[str] = set()
    chosen_kinds: set[Kind] = set()
    for item in asked:
        if kinds and item.lower() == "all":
            chosen.update(known)
        elif kinds and item.lower() in {*Kind}:
            chosen_kinds.add(Kind(item.lower()))
        elif item in known:
            chosen.add(item)
        else:
            names = "ids" if not kinds else f"ids, kinds ({', '.join(Kind)}) or 'all'"
            separated = " separated by commas" if where.startswith("GEMMA4_COMPAT_") else " in a list"
            unknown = unknown_id(item, {*known, *map(str, Kind if kinds else ())})
            notice.warn(f"{where}: {unknown} Write {names}{separated}.")
    return frozenset(chosen), frozenset(chosen_kinds)


def _flag(variable: str, environ: Mapping[str, str]) -> bool:
    value = environ.get(variable, "").strip().lower()
    if value not in _TRUE | _FALSE:
        notice.warn(f"{variable}={value!r} is neither on nor off and is ignored; set it to 1, or unset it.")
    return value in _TRUE
