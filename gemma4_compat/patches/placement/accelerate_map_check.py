"""Anything wrong with a device map is reported by ``dispatch_model`` before a module is moved.

Symptom: silent: ``dispatch_model`` ignores device-map entries that match no module of Gemma 4, such as
``multi_modal_projector``, and what they should have placed ends up elsewhere. A map that omits a module or names a
device that does not exist ends in a list of every parameter concerned, or in a torch error after half of the model
has been moved.

Cause: ``check_device_map`` lists the entries that match nothing and does no more. ``dispatch_model`` tests a device
only by moving modules to it.

Fix: For Gemma 4 models, a device that does not exist and a module without a device each raise one error before
anything is moved. Entries that match nothing give one warning that names the nearest modules (Gemma 4's multimodal
embedders are ``model.embed_vision`` and ``model.embed_audio``). ``offload_folder``, the name that transformers uses,
is accepted for ``offload_dir``.

Remove when: accelerate names the nearest modules of an entry that matches none, and reports bad devices and unplaced
modules before it moves anything.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gemma4_compat._engine.patch import Outcome, Patch, Severity, Target
from gemma4_compat._models import device_maps, family

if TYPE_CHECKING:
    from gemma4_compat._reproduction.workspace import Workspace


def dispatch_model(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if "offload_folder" in kwargs:
        folder = kwargs.pop("offload_folder")
        kwargs.setdefault("offload_dir", folder)
    call = inspect.signature(original).bind(*args, **kwargs)
    model, placement = call.arguments["model"], call.arguments["device_map"]
    if family.is_gemma4(model):
        device_maps.check(model, placement)
    return original(*call.args, **call.kwargs)


def reproduce(workspace: Workspace) -> Outcome:
    import tempfile
    import warnings

    from accelerate import dispatch_model

    from gemma4_compat._reproduction import tiny

    model = workspace.load()
    placement = tiny.device_map(model, "towers", main=workspace.main, offloaded=workspace.offloaded)
    placement["model.multi_modal_projector"] = workspace.offloaded
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dispatch_model(model, placement, offload_dir=tempfile.mkdtemp(dir=workspace.folder))
    warned = [str(warning.message) for warning in caught if "multi_modal_projector" in str(warning.message)]
    if any("model.embed_vision" in text for text in warned):
        return Outcome(False, f"one warning: {warned[0]}")
    return Outcome(True, f"the entry is ignored; {warned[0] if warned else 'no warning'}")


PATCH = Patch(
    id="accelerate-map-check",
    severity=Severity.MEMORY,
    failure_points=("F26", "F27"),
    distribution="accelerate",
    affected=">=1.12",
    requires=("transformers>=5.5",),
    after=("accelerate-move-offloaded",),
    targets=(Target(module="accelerate.big_modeling", name="dispatch_model", replacement=dispatch_model),),
    reproduce=reproduce,
)
