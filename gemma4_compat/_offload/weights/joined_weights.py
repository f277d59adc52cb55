"""Tied weights that a dispatch takes apart become one parameter again without their hooks.

accelerate gives each offloaded module its own parameter, and they stay separate when the hooks are removed. On one
device a tied weight is one parameter, saved once and trained once.
"""

from __future__ import annotations

import weakref
from typing import Any

from gemma4_compat._gemma4.accelerate import attached, module_hooks
from gemma4_compat._offload.weights import stored_weights, tied_pairs

_MODEL = attached.DISPATCHED_IN


class _Reference:
    """A weak reference to a model. A deep copy of the model refers to the copy; a copy of a part refers to nothing."""

    def __init__(self, model: Any) -> None:
        self.get = (lambda: None) if model is None else weakref.ref(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Reference:
        return _Reference(memo.get(id(self.get())))

    def __reduce__(self) -> tuple[Any, ...]:
        return _Reference, (None,)


def note(model: Any, module: Any) -> None:
    """Remember which dispatched model ``module`` is in. It is offloaded, or has a weight tied to an offloaded one."""
    vars(module)[_MODEL] = _Reference(model)


def forget(module: Any) -> None:
    vars(module).pop(_MODEL, None)


def model_of(module: Any) -> Any:
    """The model that :func:`note` remembered for a module; None without a note, or if the model is gone."""
    reference = vars(module).get(_MODEL)
    return None if reference is None else reference.get()


def join(model: Any, module: Any) -> None:
    """Make the halves of a tied weight one parameter again. One belongs to the module, whose hook is being removed.

    Only if they have the same values. While the other half is offloaded, or a hook keeps it on another device, they
    stay apart until its hook is removed.
    """
    import torch

    for pair in tied_pairs.pairs(model):
        target, source = (owner._parameters[name] for owner, name in pair)
        others = [owner for owner, _ in pair if owner is not module]
        if target is source or len(others) != 1 or module_hooks.offload_hook(others[0]) is not None:
            continue
        if target.device != source.device and "_hf_hook" in vars(others[0]):
            continue
        if {type(target), type(source)} != {torch.nn.Parameter} or _is_shared(model, target):
            continue
        if stored_weights.equal(target.data, source.data):
            kept = target if source.device.type == "cpu" else source  # use no memory of an accelerator
            for owner, name in pair:
                owner._parameters[name] = kept


def _is_shared(model: Any, parameter: Any) -> bool:
    """Whether another module also has it: an adapter's copy of the embedding, to which the head was tied."""
    return sum(own is parameter for part in model.modules() for own in part._parameters.values()) > 1
