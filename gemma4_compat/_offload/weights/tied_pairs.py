"""Tied weights that a device map separates: one parameter on one device, two with a copy each if they are apart.

:func:`tied` finds them, and :func:`tie` gives one the value of the other. :mod:`stored_weights` reads and replaces a
single one.
"""

from __future__ import annotations

import copy
from typing import Any

from gemma4_compat._gemma4.accelerate import attached, module_hooks
from gemma4_compat._gemma4.models import walk
from gemma4_compat._offload import host_memory
from gemma4_compat._offload.weights import stored_weights
from gemma4_compat._offload.weights.stored_weights import Place


def is_shared(model: Any, name: str, owner: str) -> bool:
    """Whether two parameters of a model, below the layers of adapters, have the same values."""
    first, second = _place(model, name), _place(model, owner)
    return first is not None and second is not None and stored_weights.is_same(first, second)


def pairs(model: Any, *, declared: bool = False) -> list[tuple[Place, Place]]:
    """Target and source of each tied weight of a model, offloaded or not; with ``declared`` also those that the model
    would tie but has not.
    """
    names = dict(getattr(model, "all_tied_weights_keys", None) or {})
    if declared:
        names.update(model.get_expanded_tied_weights_keys(all_submodels=True))
    found = [(_place(model, target), _place(model, source)) for target, source in names.items()]
    return [(target, source) for target, source in found if target and source]


def tied(model: Any, *, declared: bool = False) -> list[tuple[Place, Place]]:
    """Target and source of each tied weight, if one of the two is offloaded.

    A target that shares the weight of an adapter's copy is left out, but not with ``declared`` (see :func:`pairs`).
    """
    return [
        (target, source)
        for target, source in pairs(model, declared=declared)
        if (declared if attached.COPYS_WEIGHT in vars(target[0]) else is_apart(target, source))
    ]


def is_apart(target: Place, source: Place) -> bool:
    """Whether one of two tied weights is offloaded."""
    return any(module_hooks.offload_hook(module) for module, _ in (target, source))


def _place(model: Any, name: str) -> Place | None:
    """Where a parameter is, below the layers of adapters; None if it does not exist."""
    path, _, attribute = name.rpartition(".")
    module = model
    for part in path.split("."):
        module = getattr(module, "_modules", {}).get(part)
    if module is not None and attribute not in module._parameters:
        module = walk.innermost(module)
    return None if module is None or module._parameters.get(attribute) is None else (module, attribute)


def tie(target: Place, source: Place) -> None:
    """Give ``target`` the value of ``source``, in place. At least one of them is offloaded."""
    import torch

    (module, name), (owner, owners_name) = target, source
    parameter, owners = module._parameters[name], owner._parameters[owners_name]
    hook = module_hooks.offload_hook(module)
    if hook is None:
        if parameter.device.type == "meta" or not stored_weights.is_same(target, source):
            device = module_hooks.hook_device(module) if parameter.device.type == "meta" else parameter.device
            with stored_weights.outside_inference():
                value = stored_weights.read(*source)
                if (parameter.device, parameter.shape, parameter.dtype) == (device, value.shape, value.dtype):
                    parameter.data.copy_(value)  # an optimizer may have it
                else:
                    value = value.to(device, copy=True)
                    module._parameters[name] = torch.nn.Parameter(value, requires_grad=owners.requires_grad)
            _serve_from(source, target)
    elif not stored_weights.is_same(target, source):
        with stored_weights.outside_inference():
            value = stored_weights.read(*source).cpu()
            if not _link(target, source):
                stored_weights.store(hook, name, value)
            stored_weights.leave_on_meta(module, name, value)
        _serve_from(target, source)


def pass_on(model: Any, changed: Place) -> None:
    """Give the weights of a model that are tied to ``changed``, and apart from it, its value."""
    for target, source in tied(model):
        if source == changed:
            tie(target, source)
        elif target == changed:
            tie(source, target)
            # the other targets of the same source
            for other, owner in tied(model):
                if owner == source and other != changed:
                    tie(other, source)


def _link(target: Place, source: Place) -> bool:
    """Make both read the same tensor or the same file; False if their weights are stored in different ways."""
    hooks = module_hooks.offload_hook(target[0]), module_hooks.offload_hook(source[0])
    if hooks[1] is None:
        return False
    mine, theirs = (host_memory.stored(hook.weights_map, name) for hook, (_, name) in zip(hooks, (target, source)))
    if mine.holder is not None and theirs.holder is not None and not theirs.casts:
        stored_weights.store(hooks[0], target[1], theirs.raw)
        return True
    if mine.index is None or theirs.index is None or theirs.is_recast:
        return False
    if "safetensors_file" not in theirs.index[theirs.key]:
        return False
    mine.index[mine.key] = {"weight_name": theirs.key, **theirs.index[theirs.key]}
    mine.forget_casts()
    hooks[0].weights_map = copy.copy(hooks[0].weights_map)
    return True


def _serve_from(offloaded: Place, resident: Place) -> None:
    """Let accelerate take a weight in host memory from the module that has it on the device, as after a dispatch."""
    hook, parameter = module_hooks.offload_hook(offloaded[0]), resident[0]._parameters[resident[1]]
    if (
        hook is None
        or module_hooks.offload_hook(resident[0]) is not None
        or offloaded[1] not in hook.tied_params_names
    ):
        return
    place = host_memory.stored(hook.weights_map, offloaded[1])
    if not place.on_disk and parameter.device == module_hooks.execution_device(offloaded[0]):
        hook.tied_params_map[place.raw.data_ptr()] = {hook.execution_device: parameter}
