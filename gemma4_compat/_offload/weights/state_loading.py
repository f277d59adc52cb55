"""``load_state_dict`` of a model with offloaded weights: each weight is loaded where it is stored.

torch loads module by module. While its turn lasts, an offloaded module has empty host parameters in place of the meta
ones, for the names that the state dict has. torch fills them with all its checks, and the result is stored. So one
module's weights are in host memory at a time, and a state dict without a module's names costs nothing.

The model's own ``state_dict`` has offloaded weights on meta. Such an entry has no value: it leaves the stored one.

On one device, loading one of two tied weights loads both. So a module with a tied weight passes on what it loaded.

:func:`fill` is for the other way: a state dict that is saved.
"""

from __future__ import annotations

from typing import Any

from gemma4_compat._gemma4.accelerate import attached, module_hooks
from gemma4_compat._gemma4.state import contents
from gemma4_compat._offload.weights import joined_weights, stored_weights, tied_pairs

_LOADING, _HOOKS = attached.LOADING, attached.LOADING_HOOKS


def install(model: Any) -> None:
    """Let a dispatched model load its offloaded weights."""
    apart = {module for pair in tied_pairs.tied(model) for module, _ in pair}
    for module in model.modules():
        forget(module)
        if module_hooks.offload_hook(module) is not None or module in apart:
            # Its public name came with torch 2.5.
            before = module._register_load_state_dict_pre_hook(_before, with_module=True)
            _HOOKS.add(module, before, module.register_load_state_dict_post_hook(_after))
            joined_weights.note(model, module)


def forget(module: Any) -> None:
    """Leave loading the module to torch, which finds nothing to load into on meta."""
    joined_weights.forget(module)
    _HOOKS.remove(module)


def _before(module: Any, state_dict: Any, prefix: str, metadata: Any, *_: Any) -> None:
    """Give the module something to load into."""
    names = [name for name in (*module._parameters, *module._buffers) if f"{prefix}{name}" in state_dict]
    offloaded = module_hooks.offload_hook(module) is not None
    found = {}
    for name in names:
        holder = stored_weights.holder(module, name)
        before = inside = holder[name]
        if before is None:
            continue
        if offloaded and before.device.type == "meta":
            inside = holder[name] = _empty(before, "meta" if _is_meta(state_dict[f"{prefix}{name}"]) else "cpu")
        found[name] = (before, inside, contents.sampled(inside))
    # With `assign`, tied weights are two weights afterwards, on one device as well.
    vars(module)[_LOADING] = found, bool(metadata.get("assign_to_params_buffers"))


def _after(module: Any, _incompatible: Any) -> None:
    """Store what was loaded."""
    found, assigned = vars(module).pop(_LOADING, ({}, False))
    hook = module_hooks.offload_hook(module)
    for name, (before, inside, empty) in found.items():
        offloaded = hook is not None and (name in module._parameters or hook.offload_buffers)
        holder = stored_weights.holder(module, name)
        now = holder[name]
        # It was not filled if it has another shape, for example, or no value.
        is_loaded = not _is_meta(now) and (now is not inside or contents.sampled(inside) != empty)
        # A tied weight may have been stored when the other one was loaded.
        if is_loaded and offloaded and not stored_weights.holds(module, name, now):
            stored_weights.write(module, name, now, in_place=not assigned)
        elif offloaded:
            holder[name] = before
        if inside is not before and (scales := vars(inside).get("SCB")) is not None and scales._version:
            stored_weights.write_scales(module, scales)  # bitsandbytes has loaded them
        if is_loaded and not assigned and (model := joined_weights.model_of(module)) is not None:
            tied_pairs.pass_on(model, (module, name))


def _is_meta(value: Any) -> bool:
    return getattr(value, "is_meta", False)  # a state dict may have anything


def _empty(meta: Any, device: str) -> Any:
    import torch

    with torch.inference_mode(False), torch.no_grad():
        empty = torch.empty(meta.shape, dtype=meta.dtype, device=device)
        if isinstance(meta, torch.nn.Parameter):
            empty = torch.Tensor._make_subclass(type(meta), empty, meta.requires_grad)
            vars(empty).update(vars(meta))  # a quantized one has its state there
            if (scales := vars(meta).get("SCB")) is not None:  # those of an 8-bit weight are loaded in place
                empty.SCB = scales.detach().clone()
    return empty


def fill(model: Any, state: dict[str, Any]) -> None:
    """Give meta entries of a split model's state dict their stored values, not copied where their parameter has that
    dtype.

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
