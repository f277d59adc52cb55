"""``load_checkpoint_and_dispatch`` also loads the buffers of modules that a device map puts on disk.

Symptom: silent: a model loaded by ``load_checkpoint_and_dispatch`` or ``load_checkpoint_in_model`` with modules on
disk computes with the values that their buffers had before the load. In Gemma 4 these are the ``layer_scalar`` of each
decoder layer and the clipping bounds of the towers' linear layers. Without ``dtype``, modules on disk, and those on
the CPU beside them, also have the dtype of the checkpoint, while the others have that of the model. A map with
everything on disk ends in an error about the device ``disk``.

Cause: ``load_checkpoint_in_model`` offloads buffers only with ``offload_buffers=True``. Without it, buffers stay in
memory when their module is on disk, but the loop over the checkpoint skips them: no branch assigns their values.
Without ``dtype``, a weight that stays in memory is cast to the parameter's dtype. A weight on disk is not, and neither
is one on the CPU that ``offload_state_dict`` (the default with a disk) has kept in a file meanwhile.

Fix: Without ``offload_buffers``, the load sees a map in which the buffers of modules on disk are on the CPU, so their
values are read. ``dispatch_model`` moves them to the device that computes the module. This holds for models of every
family: a buffer from the checkpoint replaces a value that the checkpoint does not have. Parameters of a Gemma 4 model
keep their dtype unless ``dtype`` says otherwise.

Remove when: ``load_checkpoint_in_model`` loads the buffers that it does not offload.
"""

import inspect
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gemma4_compat._gemma4.accelerate import device_maps
from gemma4_compat._gemma4.models import family
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F65", severity="wrong_result", affected=">=1.12", acts_on="every model")


@PATCH.replaces("accelerate.utils.modeling", "load_checkpoint_in_model")
def load_checkpoint_in_model(original: Original, *args: Any, **kwargs: Any) -> Any:
    call = inspect.signature(original).bind(*args, **kwargs)
    given = call.arguments
    model, placement = given["model"], given.get("device_map")
    if not isinstance(placement, Mapping):
        return original(*args, **kwargs)
    if not given.get("offload_buffers", False):
        on_disk = [
            name
            for name, _ in model.named_buffers()
            if placement.get(device_maps.entry_for(name, placement) or "") == "disk"
        ]
        given["device_map"] = {**placement, **dict.fromkeys(on_disk, "cpu")}
    keeps_dtypes = given.get("dtype") is None and family.has_parts(model)
    dtypes = _dtypes(model) if keeps_dtypes else {}
    result = original(*call.args, **call.kwargs)
    for name, dtype in _dtypes(model).items():
        if dtypes.get(name, dtype) != dtype:
            parameter = model.get_parameter(name)
            parameter.data = parameter.data.to(dtypes[name])
    return result


def _dtypes(model: Any) -> dict[str, Any]:
    """The dtypes of parameters that are not quantized. For those on meta, a forward casts the stored weight to it."""
    import torch

    return {
        name: parameter.dtype
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if type(parameter) is torch.nn.Parameter and parameter.is_floating_point()
    }


def scaled_checkpoint(workspace: Workspace) -> Path:
    """The workspace's checkpoint with a ``layer_scalar`` that is not 1, as in published checkpoints."""

    def scaled_layers(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        shutil.copytree(workspace.checkpoint, folder, dirs_exist_ok=True)
        weights = load_file(folder / "model.safetensors")
        weights |= {name: value / 2 for name, value in weights.items() if name.endswith(".layer_scalar")}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return workspace.cached(scaled_layers)


def reproduce(workspace: Workspace) -> Outcome:
    import torch
    from accelerate import load_checkpoint_and_dispatch

    from gemma4_compat._lab import tiny, tiny_models

    checkpoint = scaled_checkpoint(workspace)
    found = []
    for offload in ("none", "both"):
        try:
            model = tiny_models.empty_model(checkpoint, torch.bfloat16)
        except LookupError as error:
            return Outcome(False, str(error), applicable=False)
        placement = tiny.device_map(model, offload, main=workspace.main, offloaded="disk")
        folder = workspace.new_folder()
        keys = tiny.skip_keys(model)
        load_checkpoint_and_dispatch(
            model, str(checkpoint), device_map=placement, offload_folder=folder, skip_keys=keys
        )
        found.append(workspace.outputs(model.eval()))
    return Outcome.of_parity(workspace.difference(*found), "load_checkpoint_and_dispatch with layers on disk")
