"""silent: ``dispatch_model`` with a device map that names modules which Gemma 4 does not have.

What they should have placed is elsewhere. A map that forgets a module, or names a device that is not there, ends in a
list of every parameter concerned, or in an error of torch after half of the model has been moved.

Why: accelerate ignores such entries (it lists them, and no more), and tries devices only by moving modules there.

Here: for Gemma 4 models, a device that does not exist and a module without one are one error, before anything is
moved. Entries that match nothing are one warning that names the nearest modules (Gemma 4's projectors are
``model.embed_vision`` and ``model.embed_audio``). ``offload_folder``, the name transformers uses, is taken for
``offload_dir``.

Goes when accelerate says as much.
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
    said = [str(warning.message) for warning in caught if "multi_modal_projector" in str(warning.message)]
    if any("model.embed_vision" in text for text in said):
        return Outcome(False, f"one warning: {said[0]}")
    return Outcome(True, f"the entry is ignored; {said[0] if said else 'nothing is said'}")


PATCH = Patch(
    id="accelerate-map-check",
    summary="dispatch_model says what is wrong with a device map before it moves anything",
    symptom="silent: device-map entries that match no module are ignored (multi_modal_projector)",
    severity=Severity.MEMORY,
    failure_points=("F26", "F27"),
    distribution="accelerate",
    affected=">=1.12",
    measured="1.15.0",
    requires=("transformers>=5.5",),
    after=("accelerate-move-offloaded",),
    retire_when="accelerate names the nearest modules of an entry that matches none",
    targets=(
        Target(
            module="accelerate.big_modeling",
            name="dispatch_model",
            replacement=dispatch_model,
            known={"ce5fa56a90e1": "1.12.0", "a6f9d638158e": "1.13.0 - 1.14.0", "e7b75432dc18": "1.15.0"},
        ),
    ),
    reproduce=reproduce,
)
