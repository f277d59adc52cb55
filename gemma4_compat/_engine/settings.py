"""The environment variables: GEMMA4_COMPAT_DISABLE, GEMMA4_COMPAT_ENABLE, GEMMA4_COMPAT_STRICT."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from gemma4_compat._engine import notice

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"", "0", "false", "no", "off"})


@dataclass(frozen=True)
class Settings:
    """What the environment asks for. ``disabled`` wins over ``enabled``."""

    disabled: frozenset[str] = frozenset()
    enabled: frozenset[str] = frozenset()
    strict: bool = False


def read(known: Collection[str], environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from the environment. A value that makes no sense is ignored with one warning that says what would."""
    environ = os.environ if environ is None else environ
    return Settings(
        disabled=_ids("GEMMA4_COMPAT_DISABLE", environ, known, wildcard=True),
        enabled=_ids("GEMMA4_COMPAT_ENABLE", environ, known, wildcard=False),
        strict=_flag("GEMMA4_COMPAT_STRICT", environ),
    )


def is_enabled(patch_id: str, environ: Mapping[str, str] | None = None) -> bool:
    """Whether ``GEMMA4_COMPAT_ENABLE`` names the patch now. Says nothing about other ids: :func:`read` does."""
    environ = os.environ if environ is None else environ
    return patch_id in {item.strip() for item in environ.get("GEMMA4_COMPAT_ENABLE", "").split(",")}


def unknown_id(patch_id: str, known: Collection[str]) -> str:
    """One sentence about an id that no patch has, with the nearest that one has."""
    close = nearest(patch_id, known)
    hint = f"did you mean {close!r}?" if close else f"known ids: {', '.join(sorted(known))}."
    return f"no patch has the id {patch_id!r}; {hint}"


def nearest(name: str, known: Collection[str]) -> str | None:
    """The known name that a misspelt one is closest to; None where none is close."""
    import difflib

    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.4)), None)


def _ids(variable: str, environ: Mapping[str, str], known: Collection[str], *, wildcard: bool) -> frozenset[str]:
    asked = [item.strip() for item in environ.get(variable, "").split(",") if item.strip()]
    chosen: set[str] = set()
    for item in asked:
        if wildcard and item.lower() == "all":
            chosen.update(known)
        elif item in known:
            chosen.add(item)
        else:
            advice = " Write ids separated by commas" + (", or 'all'." if wildcard else ".")
            notice.warn(f"{variable}: {unknown_id(item, known)}{advice}")
    return frozenset(chosen)


def _flag(variable: str, environ: Mapping[str, str]) -> bool:
    value = environ.get(variable, "").strip().lower()
    if value not in _TRUE | _FALSE:
        notice.warn(f"{variable}={value!r} is neither on nor off and is ignored; set it to 1, or unset it.")
    return value in _TRUE
