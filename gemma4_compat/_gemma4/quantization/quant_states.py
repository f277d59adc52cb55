"""Copies of a bitsandbytes ``QuantState``: pristine ones on the host, fresh ones on a device, unpacked ones.

Facts about a state are kept as plain attributes on it, so it pickles and deep-copies as before, and loads without this
package. Neither this package nor bitsandbytes writes a state's tensors in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.accelerate import attached
from gemma4_compat._gemma4.state import contents

PRISTINE, ORIGIN, UNPACKED = attached.PRISTINE, attached.ORIGIN, attached.UNPACKED


def is_pristine(state: Any) -> bool:
    """Whether this is the host copy of an offloaded state, which may be copied but never moved or changed."""
    return bool(vars(state).get(PRISTINE, False))


def is_packed(state: Any) -> bool:
    """Whether state and weight are in the layout bitsandbytes uses on CPUs with AVX512-BF16."""
    return bool(getattr(state, "packing_format_for_cpu", False))


def before_packing(state: Any) -> Any:
    """A copy of a packed state as it was for the unpacked weight; the state itself if that is not known."""
    before = vars(state).get(UNPACKED)
    if before is None:
        return state
    copied = object.__new__(type(state))
    vars(copied).update(before)
    return copied


def unpacked_on_meta(state: Any) -> Any:
    """A meta tensor with the shape and the dtype that the weight of a packed state has when it is unpacked."""
    import torch

    stored = torch.empty(state.original_qshape, dtype=torch.uint8, device="meta")
    dtype = vars(state).get("original_storage_type")
    return stored if dtype is None else stored.view(dtype)


def host_copy(state: Any) -> Any:
    """The pristine state for ``state``: the one it was made from, or a copy with all tensors on the host."""
    if is_pristine(state):
        return state
    if ORIGIN in vars(state):
        note_dtype(state)
        return vars(state)[ORIGIN]
    copied = _copy(state, lambda tensor: tensor.to("cpu"))  # tensors already on the host are shared
    setattr(copied, PRISTINE, True)
    setattr(state, ORIGIN, copied)  # accelerate moves each parameter twice; one copy serves both
    return copied


def note_dtype(state: Any) -> None:
    """Give the pristine state, if there is one, the dtype that a forward gave to its copy.

    On a CPU, bitsandbytes before 0.50 sets it to the input's dtype, and from then on dequantizes the weight to it.
    """
    pristine = vars(state).get(ORIGIN)
    if pristine is not None:
        pristine.dtype = vars(state).get(UNPACKED, vars(state))["dtype"]


def device_copy(pristine: Any, device: Any) -> Any:
    """A fresh state on ``device`` that shares no tensor with the pristine one and remembers it.

    Raises:
        Gemma4CompatError: see :func:`check_not_lost`.
    """
    check_not_lost(pristine)
    copied = _copy(pristine, lambda tensor: tensor.to(device, copy=True))
    delattr(copied, PRISTINE)
    setattr(copied, ORIGIN, pristine)
    return copied


def with_data(weight: Any, value: Any) -> Any:
    """The quantized ``weight``, which is on meta, with ``value`` as its data and scales of its own beside it."""
    import torch

    new = torch.Tensor._make_subclass(type(weight), value, False)
    vars(new).update(vars(weight))
    if (state := vars(weight).get("quant_state")) is not None:
        new.quant_state = device_copy(state, value.device)
    if (scales := vars(weight).get("SCB")) is not None:
        new.CB, new.SCB = value, scales.to(value.device, copy=True)
    return new


def check_not_lost(state: Any) -> None:
    """Raise :class:`Gemma4CompatError` if the state's scales were moved to meta before a copy was made."""
    if state.absmax is not None and state.absmax.device.type == "meta":
        raise Gemma4CompatError(
            f"the quantization state of a 4-bit weight of shape {tuple(state.shape or ())} was destroyed by an "
            "earlier move to meta, before the patch bitsandbytes-meta-quant-state was active; its scales are gone. "
            "Import gemma4_compat first and load the model again."
        )


def tensors(state: Any) -> list[Any]:
    """Every tensor of a state, including those of its nested state."""
    return [tensor for _, tensor in contents.named_tensors(state)]


def with_tensors(pristine: Any, known: Mapping[int, Any]) -> Any:
    """A copy of a pristine state that remembers it, with its tensors replaced; ``known`` maps ``id`` of a tensor to
    its replacement.
    """
    copied = _copy(pristine, lambda tensor: known[id(tensor)])
    if vars(copied).pop(PRISTINE, False):
        setattr(copied, ORIGIN, pristine)
    return copied


def replace_tensors(pristine: Any, known: Mapping[int, Any]) -> None:
    """Let a pristine state keep its values in other tensors; ``known`` maps ``id`` of a tensor to its replacement."""
    vars(pristine).update(vars(_copy(pristine, lambda tensor: known[id(tensor)])))


def _copy(state: Any, changed: Callable[[Any], Any]) -> Any:
    """A copy with every tensor ``changed``, including those of the nested state; other attributes are the same."""
    import torch

    copied = object.__new__(type(state))
    for name, value in vars(state).items():
        if isinstance(value, torch.Tensor):
            value = changed(value)
        elif name == "state2" and value is not None:
            value = _copy(value, changed)
        vars(copied)[name] = value
    return copied
