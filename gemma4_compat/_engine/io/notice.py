"""Warnings that point at the user's line, however deep in the libraries they arise.

Most warnings of the engine arise inside an import. If a filter turns one into an error (``-W error``, pytest's
``filterwarnings``), that import would fail, and the next would succeed without the repair, so :func:`warn` never
raises. Set ``GEMMA4_COMPAT_STRICT`` to get errors instead. Problems in the user's own call are ordinary warnings:
:func:`warn_user`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection
from types import FrameType

from gemma4_compat._errors import Gemma4CompatWarning

_MACHINERY = {
    "gemma4_compat",
    "_gemma4_compat_hook",
    "contextlib",
    "importlib",
    "_frozen_importlib",
    "_frozen_importlib_external",
    "wrapt",
}
#: The packages between the user's line and the code that a patch replaces.
LIBRARIES = frozenset({"torch", "transformers", "accelerate", "peft", "bitsandbytes", "trl", "functools", "threading"})


def warn_user(message: str, category: type[Warning] = Gemma4CompatWarning) -> None:
    """Warn about the user's line that led here through this package and the libraries that it patches.

    Raises:
        Gemma4CompatWarning: (or ``category``) a filter turns warnings into errors.
    """
    frame = _caller(_MACHINERY | LIBRARIES)
    names = frame.f_globals
    registry = names.setdefault("__warningregistry__", {})
    file, line = frame.f_code.co_filename, frame.f_lineno
    warnings.warn_explicit(message, category, file, line, names.get("__name__"), registry)


def warn(message: str, libraries: Collection[str] = ()) -> None:
    """Warn about the line outside this package, the import machinery and these ``libraries`` that led here.

    A filter decides whether it is shown, and how often. If the filter says "error", it is shown and not raised.
    """
    frame = _caller({*_MACHINERY, *libraries})
    file, line, names = frame.f_code.co_filename, frame.f_lineno, frame.f_globals
    registry = names.setdefault("__warningregistry__", {})
    try:
        warnings.warn_explicit(message, Gemma4CompatWarning, file, line, names.get("__name__"), registry)
    except Gemma4CompatWarning as warning:
        show(warning, file, line)


def show(warning: Gemma4CompatWarning, file: str, line: int) -> None:
    """Show a warning that a filter has turned into an exception."""
    warnings.showwarning(warning, Gemma4CompatWarning, file, line)


def _caller(skipped: Collection[str]) -> FrameType:
    """The innermost frame whose top-level package is not skipped; if all are, the outermost frame."""
    frame = sys._getframe(1)
    while str(frame.f_globals.get("__name__")).partition(".")[0] in skipped and frame.f_back is not None:
        frame = frame.f_back
    return frame
