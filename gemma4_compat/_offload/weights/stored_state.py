"""The state dict of a split model with the stored values, where torch's has meta tensors."""

from __future__ import annotations

from typing import Any

from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat._offload.weights import stored_weights, tied_pairs


def fill(model: Any, state: dict[str, Any]) -> None:
    """Give meta entries of a model's state dict their stored values. Values stored in their parameter's dtype are not
    copied.

    Tied weights are one tensor, as in the state dict of one device.
    """
    offloaded = [name for name, value in state.items() if getattr(value, "is_meta", False)]
    if not offloaded:
        return
    names = {module: path for path, module in model.named_modules()}
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in offloaded:
        path, _, attribute = name.rpartition(".")
        module = modules.get(path)
        if module is None or module_hooks.offload_hook(module) is None:
            continue
        if stored_weights.holder(module, attribute).get(attribute) is not None:
            state[name] = stored_weights.read(module, attribute)
    owner = module_hooks.map_owner(model)
    for pair in () if owner is None else tied_pairs.tied(owner):
        target, source = (f"{names[module]}.{name}" for module, name in pair)
        if {target, source} <= state.keys() and stored_weights.is_same(*pair):
            state[target] = state[source]
