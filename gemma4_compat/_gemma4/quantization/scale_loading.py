"""``load_state_dict`` of 4-bit layers and experts loads the scales that their ``state_dict`` saves.

bitsandbytes has no method for it: its layers save the scales beside the packed bytes, and torch does not know them. So
with ``strict`` a load of the model's own state dict raises, and without it the bytes are loaded without their scales.

While its turn lasts, a module takes the scales of its weights out of the state dict, and afterwards its weights have
them, wherever they are. Equal scales stay the objects that they are.
"""

from __future__ import annotations

from typing import Any

from gemma4_compat._gemma4.accelerate import attached, module_hooks
from gemma4_compat._gemma4.quantization import expert_storage, quant_states

_TAKEN, _HOOKS = attached.SCALES, attached.SCALE_HOOKS
_NESTED = ("nested_absmax", "nested_quant_map")


def install(model: Any) -> None:
    """Let the 4-bit weights of a model load their scales."""
    for module in model.modules():
        if any("quant_state" in vars(parameter) for parameter in module._parameters.values() if parameter is not None):
            _register(module)


def renew(model: Any) -> None:
    """After other hooks of a load were registered: have those of :func:`install` run after them again."""
    for module in model.modules():
        if module in _HOOKS:
            _register(module)


def _register(module: Any) -> None:
    _HOOKS.remove(module)
    # Its public name came with torch 2.5.
    before = module._register_load_state_dict_pre_hook(_before, with_module=True)
    _HOOKS.add(module, before, module.register_load_state_dict_post_hook(_after))


def _before(module: Any, state_dict: Any, prefix: str, *rest: Any) -> None:
    """Take the scales that belong to the module's weights out of the state dict."""
    errors = rest[-1]
    taken = {}
    for name, parameter in module._parameters.items():
        state = None if parameter is None else vars(parameter).get("quant_state")
        if state is None:
            continue
        if quant_states.is_packed(state):  # its bytes have another shape meanwhile
            from bitsandbytes import functional

            unpack = vars(functional)["_convert_weight_packed_for_cpu_inverse"]
            parameter.data, parameter.quant_state = unpack(parameter.data, state)
        found = _found(state_dict, f"{prefix}{name}.")
        if found is None:
            continue
        for key in found:
            del state_dict[f"{prefix}{name}.{key}"]
        packed = state_dict.get(f"{prefix}{name}")
        if any(value.is_meta for value in found.values()) or (packed is not None and packed.shape != parameter.shape):
            continue  # without values; or torch says what is wrong with the weight
        device = "cpu" if parameter.is_meta else parameter.device
        loaded = expert_storage.state_of({key: value.detach().clone() for key, value in found.items()}, device)
        if loaded.shape != parameter.quant_state.shape:
            state_dict.pop(f"{prefix}{name}", None)
            errors.append(
                f"size mismatch for {prefix}{name}: a 4-bit weight of shape {tuple(loaded.shape)} in the checkpoint, "
                f"of shape {tuple(parameter.quant_state.shape)} in the current model."
            )
            continue
        taken[name] = loaded
    vars(module)[_TAKEN] = taken


def _found(state_dict: Any, prefix: str) -> dict[str, Any] | None:
    """The tensors of a quantization state in a state dict; None if one is missing."""
    known = (*expert_storage.STORED, *expert_storage.STORED_STATES)
    found = {key: state_dict[f"{prefix}{key}"] for key in known if f"{prefix}{key}" in state_dict}
    states = [key for key in expert_storage.STORED_STATES if key in found]
    nested = [key in found for key in _NESTED]
    if len(states) != 1 or not {"absmax", "quant_map"} <= found.keys() or any(nested) != all(nested):
        return None
    return found


def _after(module: Any, _incompatible: Any) -> None:
    """Give the weights the scales that were taken."""
    for name, loaded in vars(module).pop(_TAKEN, {}).items():
        parameter = module._parameters[name]
        state = vars(parameter).get("quant_state")
        if state is not None and _are_same(state, loaded):
            continue
        if module_hooks.offload_hook(module) is not None:
            setattr(loaded, quant_states.PRISTINE, True)
        is_layer = "quant_state" in vars(module)  # it refers to its weight's state, and the weight to it
        if state is None:  # with `assign` it is another tensor, of any class
            parameter = module._parameters[name] = expert_storage.with_state(parameter.data, loaded)
            if is_layer:
                parameter.module = module
        parameter.quant_state = loaded
        parameter.blocksize, parameter.quant_type = loaded.blocksize, loaded.quant_type
        parameter.compress_statistics = loaded.nested
        if is_layer:
            module.quant_state = loaded


def _are_same(state: Any, other: Any) -> bool:
    facts = [
        (one.shape, one.dtype, one.blocksize, one.quant_type, one.nested, one.nested and one.state2.blocksize)
        for one in (state, other)
    ]
    if facts[0] != facts[1]:
        return False
    pairs = zip(quant_states.tensors(state), quant_states.tensors(other), strict=True)
    return all(
        (one.shape, one.dtype) == (two.shape, two.dtype) and module_hooks.same_bytes(one, two) for one, two in pairs
    )
