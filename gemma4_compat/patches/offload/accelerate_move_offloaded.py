"""An offloaded model, wrapped or not, comes whole to the CPU, and refuses other moves before anything is moved.

Symptom: ``NotImplementedError: Cannot copy out of meta tensor`` from ``model.cpu()`` on a partly offloaded model,
and from ``.to(device)``, ``.cuda()`` or ``.cpu()`` on a wrapper such as ``PeftModel``. The part before the first
offloaded module has already been moved, so the next forward finds the model's tensors on two devices.

Cause: ``dispatch_model`` guards ``to`` and ``cuda`` of the model it dispatches, but not ``cpu``. A move of a wrapper
walks down the modules through ``nn.Module._apply`` and bypasses the guard.

Fix: A dispatched model with offloaded modules also guards its ``_apply``, which every move uses. A move to the CPU
brings the offloaded weights into host memory first and ends the dispatch: the model is then on one device. Before
any other move, the guard raises accelerate's own message, with the number of offloaded modules and the name of the
first one; the error is also the ``NotImplementedError`` that upstream raises. accelerate's own guard, of ``to`` of the
dispatched model itself, still refuses every move.
Changes of dtype pass: they move nothing, and offloaded weights are converted when they are onloaded. The guard
removes itself once nothing is offloaded. A deep copy of the model has its own guard.

Remove when: accelerate refuses every move of a model with offloaded modules, by guarding ``_apply`` or every method
that uses it.
"""

import functools
from collections.abc import Callable
from typing import Any

from gemma4_compat._engine.runtime import in_place
from gemma4_compat._errors import OffloadedWeightsError
from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F3", severity="crash", affected=">=1.12", acts_on="every model", after="accelerate-offload-folder")


@PATCH.replaces("accelerate.big_modeling", "dispatch_model")
def dispatch_model(original: Original, *args: Any, **kwargs: Any) -> Any:
    model = original(*args, **kwargs)
    if _has_offload_hooks(model):
        # A partial, not a closure, so that a deep copy of the model gets its own guard.
        in_place.replace(model, "_apply", functools.partial(_guarded_apply, model))
    return model


def _guarded_apply(model: Any, below: Any, fn: Callable[[Any], Any], *args: Any, **kwargs: Any) -> Any:
    names = [name for name, module in model.named_modules() if module_hooks.is_offloaded(module)]
    if names and _brings_to_cpu(fn):
        _end_dispatch(model)
    elif names and _moves(fn):
        raise OffloadedWeightsError(
            f"You can't move a model that has some modules offloaded to cpu or disk ({len(names)} here, {names[0]!r} "
            "the first). Nothing was moved. model.cpu() brings them into host memory first; or load the model with "
            "another device_map."
        )
    if not names and not _has_offload_hooks(model):
        in_place.restore(model, "_apply", _guarded_apply)
    return below(fn, *args, **kwargs)


def _end_dispatch(model: Any) -> None:
    from accelerate.hooks import remove_hook_from_submodules

    remove_hook_from_submodules(model)
    vars(model).pop("hf_device_map", None)
    in_place.restore(model, "_apply", _guarded_apply)


def _has_offload_hooks(model: Any) -> bool:
    """Also if nothing is on meta: accelerate ties an offloaded head to its embedding until its first forward."""
    return any(module_hooks.offload_hook(module) is not None for module in model.modules())


def _moves(fn: Callable[[Any], Any]) -> bool:
    """Whether ``fn`` moves tensors on meta to another device (which torch refuses, or for which it makes up
    values).
    """
    import torch

    try:
        return bool(fn(torch.empty(0, device="meta")).device.type != "meta")
    except NotImplementedError:
        return True


def _brings_to_cpu(fn: Callable[[Any], Any]) -> bool:
    """Whether ``fn`` copies values to the CPU; ``to_empty`` makes them up."""
    import torch

    try:
        fn(torch.empty(0, device="meta"))
    except NotImplementedError:
        return bool(fn(torch.empty(0)).device.type == "cpu")
    return False


def reproduce(workspace: Workspace) -> Outcome:
    from peft import PeftModel

    base = workspace.split()
    base.cpu()  # first: without other patches, PEFT's load undoes the offload
    found = [
        workspace.difference(*(workspace.outputs(model, device="cpu") for model in (workspace.load().cpu(), base)))
    ]
    pair = [
        PeftModel.from_pretrained(model, workspace.adapter("language"))
        for model in (workspace.load(), workspace.split())
    ]
    found.append(workspace.difference(*(workspace.outputs(model.to("cpu"), device="cpu") for model in pair)))
    model = workspace.split()
    before = {name: parameter.device for name, parameter in model.named_parameters()}
    try:
        model.to_empty(device="cpu")
    except RuntimeError as error:
        found.append(float({name: parameter.device for name, parameter in model.named_parameters()} != before))
        return Outcome.of_parity(max(found), f"a split model after cpu(), and {type(error).__name__} of to_empty()")
    return Outcome(True, "moved without an error, and without its values")
