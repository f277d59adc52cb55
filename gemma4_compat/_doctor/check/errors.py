"""A crash as data: what a reader is told, and the part of it that may leave the machine."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gemma4_compat import _shim
from gemma4_compat._doctor.explain import explanation
from gemma4_compat._engine.reports import words
from gemma4_compat._engine.reports.words import Verdict
from gemma4_compat._errors import Gemma4CompatError, printable

#: Libraries whose frames a report names; a frame of the user's code would name a path.
_LIBRARIES = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "safetensors", "gemma4_compat")
_FRAMES, _LONGEST = 6, 500
_NOTHING: dict[str, Any] = {"patches": [], "advice": None}
_OFF = (Verdict.OFF, Verdict.REVERTED, Verdict.FAILED)


def described(error: BaseException) -> dict[str, Any]:
    """An error with the patches that repair it: ``type``, ``message``, ``frames``, ``patches``, ``advice``, and
    ``refusal`` (this package raised it).

    ``message`` may hold paths and names; :func:`impersonal` leaves it out.
    """
    first, *others = [line.strip() for line in str(error).strip().splitlines()] or [""]
    refusal = isinstance(error, Gemma4CompatError)  # its message says what to do
    told = _NOTHING if refusal else _told("".join(traceback.format_exception(error)))
    return {
        "type": type(error).__name__,
        "message": printable(f"{first} {others[-1]}" if others else first)[:_LONGEST],
        "refusal": refusal,
        "frames": list(_frames(error)),
        **told,
    }


def of_process(kind: str, message: str, output: str = "") -> dict[str, Any]:
    """The same for a process that ended without saying why; ``output`` is what it wrote to standard error."""
    told = _told(output) if output.strip() else _NOTHING
    return {"type": kind, "message": message, "refusal": False, "frames": [], **told}


def impersonal(error: dict[str, Any]) -> dict[str, Any]:
    """The part of a described error that holds no path, name or text of the user's."""
    return {name: error[name] for name in ("type", "frames", "patches")}


def sentence(error: dict[str, Any]) -> str:
    """The error's last line, and what ``explain`` knows about it."""
    said = f"{error['type']}: {error['message']}" if error["message"] else error["type"]
    for patch in error["patches"]:
        said += f" Repaired by {patch['id']}, which is {patch['state']} here."
    return f"{said} {error['advice']}" if error["advice"] and not error["patches"] else said


def _told(text: str) -> dict[str, Any]:
    """What ``explain`` answers: patches that certainly concern it, those that may and are off, or what else to do."""
    try:
        found, _ = explanation.look_up(explanation.read(text), _shim.patches(), _shim.status())
    except Gemma4CompatError:  # there is no error in the text
        return _NOTHING
    statuses = _shim.status()
    known = [
        {"id": patch.id, "state": words.of(statuses[patch.id]).word}
        for patch in found.patches
        if patch in found.certain or words.of(statuses[patch.id]) in _OFF
    ]
    return {"patches": known, "advice": found.advice}


def _frames(error: BaseException) -> Iterable[str]:
    """The last frames in libraries, as ``transformers/modeling_utils.py:123 from_pretrained``."""
    found = []
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        for name in _LIBRARIES:
            root = getattr(sys.modules.get(name), "__file__", None)
            if root is not None and path.is_relative_to(Path(root).parent):
                inside = path.relative_to(Path(root).parent).as_posix()
                found.append(f"{name}/{inside}:{frame.lineno} {frame.name}")
    return found[-_FRAMES:]
