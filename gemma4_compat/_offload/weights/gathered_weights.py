"""Offloaded modules that temporarily have their weights and no accelerate hooks; tied ones become one parameter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from gemma4_compat._gemma4.accelerate import attached, module_hooks
from gemma4_compat._gemma4.state import contents
from gemma4_compat._offload.weights import stored_weights, tied_pairs


@contextlib.contextmanager
def gathered(model: Any, getters: list[Callable[[], Any]], device: Any = None) -> Iterator[None]:
    """Inside, modules have their weights and no accelerate hooks, and tied weights are one parameter.

    Afterwards everything is back in place, with the weights' new values. Does nothing if none of the modules is
    offloaded.

    Args:
        model: declares which weights are tied.
        getters: each returns one of the modules, or None. Afterwards it may return another module.
        device: where the weights go; None for the device on which their module computes.
    """
    roots = [(getter, root) for getter in getters if (root := getter()) is not None]
    parts = {part: dict(part._parameters) for _, root in roots for part in root.modules() if "_hf_hook" in vars(part)}
    if not any(module_hooks.offload_hook(part) for part in parts):
        yield
        return
    pairs = [pair for pair in tied_pairs.tied(model) if all(module in parts for module, _ in pair)]
    for part in parts:
        _bring(part, device)
    for (module, name), (owner, owners_name) in pairs:
        if module_hooks.offload_hook(module) is None:  # the module that stays on its device is both
            owner._parameters[owners_name] = module._parameters[name]
        else:
            module._parameters[name] = owner._parameters[owners_name]
    inside = {part: {name: _identity(value) for name, value in part._parameters.items()} for part in parts}
    try:
        with module_hooks.hooks_off(parts):
            yield
    finally:
        now = {root: getter() for getter, root in roots}
        targets, pairs_changed = {target for target, _ in pairs}, []
        for part, before in parts.items():
            if now.get(part, part) is not part:
                _move_hook(part, now[part])
            tied_names = {name for module, name in targets if module is part}
            changed = _put_back(now.get(part, part), before, inside[part], tied_names)
            pairs_changed += [pair for pair in pairs for name in changed if (part, name) in pair]
        for target, source in pairs_changed:
            tied_pairs.tie(*((now.get(module, module), name) for module, name in (target, source)))


def _bring(part: Any, device: Any) -> None:
    import torch

    hook = module_hooks.offload_hook(part)
    where = module_hooks.hook_device(part) if device is None else device
    for name, parameter in part._parameters.items():
        if parameter is None or (hook is None and (where is None or parameter.device == torch.device(where))):
            continue
        if type(parameter) is not torch.nn.Parameter:  # quantized: where it computes
            hook.pre_forward(part)
            return
        value = stored_weights.read(part, name).to(where)
        part._parameters[name] = torch.nn.Parameter(value, requires_grad=parameter.requires_grad)


def _put_back(part: Any, before: dict[str, Any], inside: dict[str, Any], tied_names: set[str]) -> list[str]:
    """Put the parameters of a module back in place; returns the names of those with new values."""
    import torch

    changed = []
    offloaded = module_hooks.offload_hook(part) is not None
    for name, parameter in part._parameters.items():
        if parameter is None:
            continue
        if inside[name] == _identity(parameter):
            part._parameters[name] = before[name]
            continue
        changed.append(name)
        if offloaded and name in tied_names:  # stored with the weight that owns it
            stored_weights.leave_on_meta(part, name, parameter)
        elif offloaded:
            stored_weights.write(part, name, parameter)
        elif parameter.device != before[name].device:
            value = parameter.data.to(before[name].device)
            part._parameters[name] = torch.nn.Parameter(value, requires_grad=parameter.requires_grad)
    return changed


def _identity(parameter: Any) -> Any:
    return None if parameter is None else (id(parameter), parameter.shape, contents.stamp(parameter))


def _move_hook(old: Any, new: Any) -> None:
    """Move the hook of ``old`` to ``new`` unchanged: it places nothing."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    add_hook_to_module(new, ModelHook())
    vars(new).update({name: value for name, value in vars(old).items() if name in ("_hf_hook", attached.COPYS_WEIGHT)})
