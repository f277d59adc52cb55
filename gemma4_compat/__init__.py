"""Import this before loading a Gemma 4 model; known defects of transformers, accelerate, peft and bitsandbytes are
repaired as those libraries are imported.

>>> import gemma4_compat
>>> gemma4_compat.status()["peft-keep-dispatch"].state
<PatchState.PENDING: 'pending'>

Importing it imports none of them. ``GEMMA4_COMPAT_DISABLE=id,id`` (or ``all``) leaves patches out,
``GEMMA4_COMPAT_ENABLE=id`` adds opt-in ones, ``GEMMA4_COMPAT_STRICT=1`` turns a patch that cannot apply into an error.
"""

from __future__ import annotations

from gemma4_compat import _registry
from gemma4_compat._engine import Engine
from gemma4_compat._errors import Gemma4CompatError, Gemma4CompatWarning
from gemma4_compat._inspect import MetaTensor, find_meta_tensors, input_device
from gemma4_compat._patch import Patch, PatchState, PatchStatus

__version__ = "0.1.0"

__all__ = [
    "Gemma4CompatError",
    "Gemma4CompatWarning",
    "MetaTensor",
    "Patch",
    "PatchState",
    "PatchStatus",
    "__version__",
    "find_meta_tensors",
    "input_device",
    "install",
    "patches",
    "revert",
    "status",
]

_engine = Engine(_registry.load())


def install() -> None:
    """Arm every patch; ``import gemma4_compat`` has done it already. Call it to re-apply after :func:`revert`.

    Idempotent and thread-safe. Libraries imported before are patched at once, the others when they are imported. A
    model that was built before is repaired too: patches replace functions of its classes, not the model.

    Raises:
        Gemma4CompatError: with ``GEMMA4_COMPAT_STRICT=1``, when a patch that is needed cannot apply.
    """
    _engine.install()


def status() -> dict[str, PatchStatus]:
    """What happened to every patch, by id, with the reason. Imports nothing."""
    return _engine.status()


def revert(id: str | None = None) -> dict[str, PatchStatus]:
    """Undo the patch ``id``, or all of them, exactly; they stay off until :func:`install`. Returns :func:`status`.

    Raises:
        Gemma4CompatError: no patch has that id (the message names the nearest one).
    """
    return _engine.revert(id)


def patches() -> tuple[Patch, ...]:
    """Every patch the package knows, whether or not this environment needs it."""
    return _engine.patches()


install()
