"""``dispatch_model`` reports everything wrong with a device map before it moves a module.

Symptom: silent: ``dispatch_model`` ignores device-map entries that match no module of Gemma 4, such as
``multi_modal_projector``, and what they should have placed ends up elsewhere. A map that omits a module or names a
device that does not exist ends in a list of all affected parameters, or in a torch error after half of the model has
been moved.

Cause: ``check_device_map`` only lists the entries that match nothing. ``dispatch_model`` tests a device only by moving
modules to it.

Fix: For Gemma 4 models, a device that does not exist and a module without a device each raise one error before
anything is moved. Entries that match nothing give one warning that names the nearest modules (Gemma 4's multimodal
embedders are ``model.embed_vision`` and ``model.embed_audio``). ``offload_folder``, the name that transformers uses,
is accepted for ``offload_dir``; a warning says that accelerate itself does not accept it. Two different folders are an
error.

Remove when: accelerate names the nearest modules of an entry that matches none, and reports bad devices and unplaced
modules before it moves anything.
"""

import inspect
import os
from typing import Any

from gemma4_compat._engine.io import notice
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.accelerate import device_maps
from gemma4_compat._gemma4.models import family
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F26 F27",
    kind="refusal",
    severity="memory",
    affected=">=1.12",
    requires="transformers>=5.5",
    after="accelerate-move-offloaded",
)


@PATCH.replaces("accelerate.big_modeling", "dispatch_model")
def dispatch_model(original: Original, *args: Any, **kwargs: Any) -> Any:
    if not family.has_parts(args[0] if args else kwargs.get("model")):
        return original(*args, **kwargs)
    signature = inspect.signature(original)
    named = {"offload_folder"} & kwargs.keys() - signature.parameters.keys()
    call = signature.bind(*args, **{name: value for name, value in kwargs.items() if name not in named})
    device_maps.check(call.arguments["model"], call.arguments["device_map"])
    if named:
        call.arguments["offload_dir"] = _folder(kwargs["offload_folder"], call.arguments.get("offload_dir"))
    return original(*call.args, **call.kwargs)


def _folder(offload_folder: Any, offload_dir: Any) -> Any:
    """The folder, given under transformers' name, accelerate's name, or both.

    Raises:
        Gemma4CompatError: the two name different folders.
    """
    if None not in (offload_folder, offload_dir) and os.fspath(offload_folder) != os.fspath(offload_dir):
        raise Gemma4CompatError(
            f"dispatch_model was given offload_dir={os.fspath(offload_dir)!r} and "
            f"offload_folder={os.fspath(offload_folder)!r}: two folders for the same weights. Nothing was moved. Give "
            "only offload_dir."
        )
    notice.warn_user(
        "dispatch_model calls it offload_dir: without gemma4_compat, the argument offload_folder is a TypeError. "
        "Write offload_dir."
    )
    return offload_dir if offload_folder is None else offload_folder


def reproduce(workspace: Workspace) -> Outcome:
    import warnings

    from accelerate import dispatch_model

    model = workspace.load()
    placement = workspace.device_map(model, "towers", "model.multi_modal_projector")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dispatch_model(model, placement, offload_dir=workspace.new_folder())
    warned = [str(warning.message) for warning in caught if "multi_modal_projector" in str(warning.message)]
    if any("model.embed_vision" in text for text in warned):
        return Outcome(False, f"one warning: {warned[0]}")
    return Outcome(True, f"the entry is ignored; {warned[0] if warned else 'no warning'}")
