"""What is on and off: the environment variables GEMMA4_COMPAT_DISABLE, GEMMA4_COMPAT_ENABLE and GEMMA4_COMPAT_STRICT,
and, for those that are not set, the table ``[tool.gemma4_compat]`` of the project.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gemma4_compat._engine import notice, project

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"", "0", "false", "no", "off"})
_DISABLE, _ENABLE, _STRICT = (f"GEMMA4_COMPAT_{name}" for name in ("DISABLE", "ENABLE", "STRICT"))


@dataclass(frozen=True)
class Settings:
    """What is asked for. ``disabled`` wins over ``enabled``.

    Attributes:
        disabled: ids of patches that are left out.
        enabled: ids of patches whose opt-in is given for the whole process.
        strict: a patch that cannot apply is an error.
        disabled_by: a variable, or a file and its key.
    """

    disabled: frozenset[str] = frozenset()
    enabled: frozenset[str] = frozenset()
    strict: bool = False
    disabled_by: str = _DISABLE


#: Of the project, as it was read last: who asks later may be in another folder.
_project: project.Project | None = None


def read(known: Collection[str], environ: Mapping[str, str] | None = None) -> Settings:
    """Settings of the environment and the project. A variable that is set, and be it empty, wins over the file.

    A value of a variable that makes no sense, and an id that is unknown, is ignored with one warning that says what
    would.

    Raises:
        Gemma4CompatError: the file has a value that makes no sense.
    """
    global _project
    environ = os.environ if environ is None else environ
    _project = found = project.read()
    disable, by = _asked(_DISABLE, environ, found)
    enable, enabled_by = _asked(_ENABLE, environ, found)
    strict = _flag(_STRICT, environ) if _STRICT in environ or found is None else bool(found.strict)
    return Settings(
        disabled=_ids(by, disable, known, wildcard=True),
        enabled=_ids(enabled_by, enable, known, wildcard=False),
        strict=strict,
        disabled_by=by,
    )


def project_file() -> Path | None:
    """The pyproject.toml whose settings count where the environment says nothing; None where no file has any."""
    return None if _project is None else _project.file


def is_enabled(patch_id: str, environ: Mapping[str, str] | None = None) -> bool:
    """Whether GEMMA4_COMPAT_ENABLE, or the project, names the patch now. Of other ids :func:`read` speaks."""
    return patch_id in _asked(_ENABLE, os.environ if environ is None else environ, _project)[0]


def unknown_id(patch_id: str, known: Collection[str]) -> str:
    """One sentence about an id that no patch has, with the nearest that one has."""
    close = nearest(patch_id, known)
    hint = f"did you mean {close!r}?" if close else "`gemma4-compat list` shows every id."
    return f"no patch has the id {patch_id!r}; {hint}"


def nearest(name: str, known: Collection[str]) -> str | None:
    """The known name that a misspelt one is closest to; None where none is close."""
    import difflib

    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.4)), None)


def _asked(variable: str, environ: Mapping[str, str], found: project.Project | None) -> tuple[Sequence[str], str]:
    """The ids that are listed, and where."""
    if variable not in environ and found is not None:
        key = variable.removeprefix("GEMMA4_COMPAT_").lower()
        listed = found.disable if variable == _DISABLE else found.enable
        if listed is not None:
            return listed, f"{found.file}: tool.gemma4_compat.{key}"
    return [item.strip() for item in environ.get(variable, "").split(",") if item.strip()], variable


def _ids(where: str, asked: Sequence[str], known: Collection[str], *, wildcard: bool) -> frozenset[str]:
    chosen: set[str] = set()
    for item in asked:
        if wildcard and item.lower() == "all":
            chosen.update(known)
        elif item in known:
            chosen.add(item)
        else:
            separated = " separated by commas" if where.startswith("GEMMA4_COMPAT_") else " in a list"
            advice = f" Write ids{separated}" + (", or 'all'." if wildcard else ".")
            notice.warn(f"{where}: {unknown_id(item, known)}{advice}")
    return frozenset(chosen)


def _flag(variable: str, environ: Mapping[str, str]) -> bool:
    value = environ.get(variable, "").strip().lower()
    if value not in _TRUE | _FALSE:
        notice.warn(f"{variable}={value!r} is neither on nor off and is ignored; set it to 1, or unset it.")
    return value in _TRUE
