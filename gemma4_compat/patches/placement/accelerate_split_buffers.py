"""``accelerate.infer_auto_device_map`` gives every buffer of a Gemma 4 model a device.

Symptom: ``ValueError: model.audio_tower.layers.1.feed_forward1.ffw_layer_2.input_max doesn't have any device set``
from ``load_checkpoint_and_dispatch``, or ``The device_map provided does not give any device for the following
parameters: model.language_model.layers.3.layer_scalar`` from ``dispatch_model``, with a map that accelerate inferred.

Cause: When a module does not fit on a device, ``infer_auto_device_map`` replaces it in its list by its submodules and
its own parameters. Its own buffers are lost. Gemma 4's decoder layers, its towers' clipped linear layers and the
vision tower have such buffers, and all of them are in the checkpoint.

Fix: A buffer that the map forgot gets the device that computes the other parts of its module. ``dispatch_model`` does
not warn of entries for single parameters and buffers.

Remove when: ``infer_auto_device_map`` in accelerate keeps the buffers of a module that it splits.
"""

from collections.abc import Mapping
from typing import Any

from gemma4_compat._gemma4.accelerate import device_maps
from gemma4_compat._gemma4.models import family
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F65", severity="crash", affected=">=1.12")


@PATCH.replaces("accelerate.utils.modeling", "infer_auto_device_map")
def infer_auto_device_map(original: Original, model: Any, *args: Any, **kwargs: Any) -> Any:
    placement = original(model, *args, **kwargs)
    return device_maps.with_buffers(model, placement) if family.has_parts(model) else placement


@PATCH.replaces("accelerate.utils.modeling", "check_device_map")
def check_device_map(original: Original, model: Any, device_map: Any, *args: Any, **kwargs: Any) -> Any:
    if family.has_parts(model):
        device_map = _without_tensors(model, device_map)
    return original(model, device_map, *args, **kwargs)


def _without_tensors(model: Any, placement: Mapping[str, Any]) -> Mapping[str, Any]:
    """The map without entries for single tensors, which upstream takes for mistakes; unchanged if it is incomplete."""
    modules = {name for name, _ in model.named_modules()}
    tensors = [name for name in placement if name not in modules and device_maps.exists(model, name)]
    if not tensors or any(device_maps.entry_for(name, placement) is None for name in model.state_dict()):
        return placement
    kept = {name: device for name, device in placement.items() if name not in tensors}
    return kept if "" in kept else {"": placement[tensors[0]], **kept}


def reproduce(workspace: Workspace) -> Outcome:
    from accelerate import dispatch_model, infer_auto_device_map

    from gemma4_compat._lab import tiny

    model = workspace.load()
    reference = workspace.reference()
    layer = type(model.model.language_model.layers[0]).__name__
    whole = [name for name in model._no_split_modules if name != layer]
    room = sum(weight.numel() * weight.element_size() for weight in model.parameters()) // 2
    placement = infer_auto_device_map(model, {workspace.main: room}, no_split_module_classes=whole)
    keys = tiny.skip_keys(model)
    try:
        dispatch_model(model, placement, offload_dir=workspace.new_folder(), skip_keys=keys)
    except ValueError as error:
        return Outcome(True, f"ValueError: {error}")
    return Outcome.of_parity(workspace.difference(reference, model), "a decoder layer on two devices")
