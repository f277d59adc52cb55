"""A model with offloaded modules changes its dtype like a model without, one cast after another.

Symptom: silent: after ``.half()`` and then ``.float()``, a bfloat16 model with offloaded modules gives different
outputs than on one device. ``.to(torch.float32)``, which moves nothing, raises ``RuntimeError: You can't move a model
that has some modules offloaded to cpu or disk.``

Cause: A cast changes only the dtype of an offloaded weight's placeholder on meta, not the stored weight.
``AlignDevicesHook.pre_forward`` converts that directly to the placeholder's current dtype. So precision that a cast in
between removes on one device (float16 has no values as small as bfloat16 has) is still there. And the guard of
``dispatch_model`` refuses every ``to``, whatever its arguments.

Fix: A cast to a dtype that cannot hold a stored weight's values is recorded at its hook and repeated whenever the
weight is read. Nothing is written and no memory is taken. A cast of one of two tied weights also casts the other: the
halves are one parameter until one of them is onloaded. ``to`` with only a dtype is let through. If ``parameter.data``
is assigned twice without another cast in between, only the second assignment is recorded.

The defect and the fix are the same for every model, so this patch is not restricted to Gemma 4.

Remove when: accelerate casts the stored weights, or repeats the casts of the placeholders.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

from gemma4_compat._engine.runtime import in_place
from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat._offload import host_memory
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F43", severity="wrong_result", affected=">=1.12", acts_on="every model", after="accelerate-move-offloaded"
)

# Module of a tied pair with an offloaded half -> its weight's name, and the other module with its name there.
_ties: weakref.WeakKeyDictionary[Any, list[tuple[str, weakref.ref[Any], str]]] = weakref.WeakKeyDictionary()


@PATCH.replaces("accelerate.big_modeling", "dispatch_model")
def dispatch_model(original: Original, model: Any, *args: Any, **kwargs: Any) -> Any:
    ties = _find_ties(model)  # before they become two weights on meta
    model = original(model, *args, **kwargs)
    found = [module for module in model.modules() if module_hooks.offload_hook(module) is not None]
    offloaded = set(found)
    for tied in ties if offloaded else ():
        for module, name in tied.items():
            _ties[module] = [(name, weakref.ref(other), its) for other, its in tied.items() if other is not module]
            found.append(module)
    for module in found:
        # Partials, not closures, so that a deep copy gets its own.
        in_place.replace(module, "_apply", functools.partial(_apply, module))
    if offloaded and in_place.own(model, "to") is not in_place.ABSENT:  # accelerate's guard
        in_place.replace(model, "to", functools.partial(_to, model))
    return model


def _find_ties(model: Any) -> list[dict[Any, str]]:
    """The modules of each tied weight, with its name there."""
    holders: dict[int, dict[Any, str]] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                holders.setdefault(id(weight), {})[module] = name
    ties = [tied for tied in holders.values() if len(tied) > 1]
    # If transformers loaded a pair to different devices, it already is two weights.
    for pair in getattr(model, "all_tied_weights_keys", {}).items():
        paths = [name.rpartition(".") for name in pair]
        with contextlib.suppress(AttributeError):  # a pattern, or a name that only exists in the whole model
            ties.append({model.get_submodule(path): name for path, _, name in paths})
    return ties


def _tied(module: Any) -> list[tuple[str, Any, str]]:
    """The ties of a module of which one side is offloaded."""
    ties = [(name, reference(), its) for name, reference, its in _ties.get(module, ())]
    return [
        (name, other, its)
        for name, other, its in ties
        if other is not None and (module_hooks.offload_hook(module) or module_hooks.offload_hook(other)) is not None
    ]


def _apply(module: Any, below: Any, fn: Callable[[Any], Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces ``nn.Module._apply``, which every cast of the module or of a module around it uses."""
    ties = _tied(module)
    if module_hooks.offload_hook(module) is None and not ties:
        in_place.restore(module, "_apply", _apply)
        return below(fn, *args, **kwargs)
    host_memory.note_casts(module)  # parameters whose data were assigned since
    applied = below(fn, *args, **kwargs)
    host_memory.note_casts(module)
    for name, other, its in ties:
        own, tied = module._parameters.get(name), other._parameters.get(its)
        if own is not None and tied is not None:
            tied.data = tied.data.to(own.dtype)
            host_memory.note_casts(other)
    return applied


def _to(model: Any, guarded: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    import torch

    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    return type(model).to(model, *args, **kwargs) if dtype and device is None else guarded(*args, **kwargs)


def reproduce(workspace: Workspace) -> Outcome:
    import torch

    def outputs(model: Any) -> Any:
        return workspace.outputs(model.half().float(), text_only=True)

    found = workspace.difference(outputs(workspace.load()), outputs(workspace.split()))
    if found == 0.0:
        try:
            workspace.split().to(torch.float32)
        except RuntimeError as error:
            return Outcome(True, f"RuntimeError: {error}")
    return Outcome.of_parity(found, "a split model after half() and float()")
