"""Run one reproduction in this process and say its result: ``python -m gemma4_compat._doctor.reproductions.child``.

Its arguments are a command and a folder. ``doctor`` runs it twice, with the shim off and on. The command ``build`` or
``build VARIANT`` creates the folder instead, and ``show ID`` asks the trained model in it (``doctor --show``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gemma4_compat import _shim
from gemma4_compat._doctor import processes
from gemma4_compat._doctor.reproductions import scenes
from gemma4_compat._engine.patch import Outcome, Patch
from gemma4_compat._lab.trained import Trained
from gemma4_compat._lab.workspace import MissingPartError, Workspace, never_wait_for_the_disk

#: Modules that a PyTorch for CPUs cannot import: they read functions of ``torch._C`` that it lacks.
FOR_GPUS = ("bitsandbytes.backends.cuda.ops",)


def run(patch_id: str, folder: Path) -> dict[str, Any]:
    """Run one reproduction and describe the result as JSON-able data; nothing but Ctrl-C escapes.

    ``ID:reverted`` first imports the libraries with all patches, then reverts all; ``ID:alone`` reverts only this one.
    """
    patch_id, _, mode = patch_id.partition(":")
    patch = {patch.id: patch for patch in _shim.engine.patches()}[patch_id]
    workspace = Workspace(folder)
    if mode:
        import_targets([patch])
        workspace.forget()  # models that were loaded with the shim
        _shim.engine.revert(patch_id if mode == "alone" else None)
    started = time.perf_counter()
    try:
        result: dict[str, Any] = dataclasses.asdict(patch.reproduce(workspace))
    except MissingPartError as error:
        result = dataclasses.asdict(Outcome(False, str(error), applicable=False))
    except Exception as error:  # the user's crash is the result here
        result = dataclasses.asdict(Outcome.of_error(error))
    result["seconds"] = round(time.perf_counter() - started, 2)
    # Where the defect remains, a search of the heap tells where upstream's functions are still in use.
    status = _shim.engine.state(patch_id, count=result["defect"])
    result |= {"state": status.state, "reason_code": status.reason_code, "reason": status.reason}
    return result | {"detection": status.detection}


def show(patch_id: str, folder: Path) -> dict[str, Any]:
    """Play the scene of one defect with the trained model in ``folder``: its ``answer``, or the ``error``."""
    result: dict[str, Any] = {"answer": None, "error": None}
    with tempfile.TemporaryDirectory(prefix="gemma4-compat-") as empty:
        try:
            result["answer"] = scenes.SCENES[patch_id].play(Trained(folder), Path(empty))
        except Exception as error:  # the user's crash is the result here
            result["error"] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    status = _shim.engine.state(patch_id, count=False)
    return result | {"state": status.state, "reason": status.reason}


def import_targets(patches: Iterable[Patch]) -> None:
    """Import the modules that these patches change, if they exist here."""
    for name in dict.fromkeys(target.module for patch in patches for target in patch.targets):
        with contextlib.suppress(ModuleNotFoundError):  # not in this release: nothing to replace
            try:
                importlib.import_module(name)
            except AttributeError:
                if name not in FOR_GPUS or _has_cuda():
                    raise


def _has_cuda() -> bool:
    """Whether this PyTorch was built for GPUs of NVIDIA or AMD."""
    import torch

    return torch.version.cuda is not None or torch.version.hip is not None


def answer(command: str, folder: Path) -> dict[str, Any]:
    """What a child answers to ``command``: ``build``, ``build VARIANT``, ``show ID``, or see :func:`run`."""
    name, _, variant = command.partition(" ")
    if name == "show":
        return show(variant, folder)
    if name != "build":
        return run(command, folder)
    workspace = Workspace.build(folder, variant or None)
    # A fork is not safe with a GPU, nor on systems whose own libraries start threads.
    return {"built": str(folder), "forks": sys.platform == "linux" and workspace.main == "cpu"}


if __name__ == "__main__":
    _say = processes.events()
    never_wait_for_the_disk()
    _say(answer(sys.argv[1], Path(sys.argv[2])))
