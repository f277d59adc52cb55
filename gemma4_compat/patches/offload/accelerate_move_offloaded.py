"""An offloaded model, wrapped or not, refuses to be moved before anything has been moved.

Symptom: ``NotImplementedError: Cannot copy out of meta tensor`` from ``model.cpu()`` on a partly offloaded model,
and from ``.to(device)``, ``.cuda()`` or ``.cpu()`` on a wrapper such as ``PeftModel``. The part before the first
offloaded module has already been moved, so the next forward finds the model's tensors on two devices.

Cause: ``dispatch_model`` guards ``to`` and ``cuda`` of the model it dispatches, but not ``cpu``. A move of a wrapper
walks down the modules through ``nn.Module._apply`` and bypasses the guard.

Fix: A dispatched model with offloaded modules also guards its ``_apply``, which every move uses. Before anything is
moved, the guard raises accelerate's own message, with the number of offloaded modules and the name of the first one;
the error is also the ``NotImplementedError`` that upstream raises.
Changes of dtype pass: they move nothing, and offloaded weights are converted when they are onloaded. The guard
removes itself once nothing is offloaded. A deep copy of the model has its own guard.

Remove when: accelerate refuses every move of a model with offloaded modules, by guarding ``_apply`` or every method
that uses it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gemma4_compat._engine.patch import ActsOn, Kind, Outcome, Patch, Severity, Target
from gemma4_compat._errors import OffloadedWeightsError
from gemma4_compat._models import placement

if TYPE_CHECKING:
    from gemma4_compat._reproduction.workspace import Workspace


def dispatch_model(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    model = original(*args, **kwargs)
    if _has_offload_hooks(model):
        # A partial and not a closure: a deep copy of the model gets a guard of its own.
        vars(model)["_apply"] = functools.partial(_guarded_apply, model)
    return model


def _guarded_apply(model: Any, fn: Callable[[Any], Any], *args: Any, **kwargs: Any) -> Any:
    names = [name for name, module in model.named_modules() if placement.is_offloaded(module)]
    if names and _moves(fn):
        raise OffloadedWeightsError(
            f"You can't move a model that has some modules offloaded to cpu or disk ({len(names)} here, {names[0]!r} "
            "the first). Nothing was moved. accelerate.hooks.remove_hook_from_submodules(model) brings them back "
            "first; or load the model with another device_map."
        )
    if not names and not _has_offload_hooks(model):
        vars(model).pop("_apply", None)
    return type(model)._apply(model, fn, *args, **kwargs)


def _has_offload_hooks(model: Any) -> bool:
    """Also where nothing is on meta: accelerate ties an offloaded head to its embedding until its first forward."""
    return any(placement.offload_hook(module) is not None for module in model.modules())


def _moves(fn: Callable[[Any], Any]) -> bool:
    """Whether ``fn`` gives tensors on meta another device (which torch refuses, or makes up values for)."""
    import torch

    try:
        return bool(fn(torch.empty(0, device="meta")).device.type != "meta")
    except NotImplementedError:
        return True


def _refusal(model: Any, move: Callable[[], Any]) -> Outcome | None:
    """The defect, when ``move`` raises something else than accelerate's guard."""
    before = {name: parameter.device for name, parameter in model.named_parameters()}
    try:
        move()
    except RuntimeError as error:  # NotImplementedError is one
        if "You can't move a model" in str(error):
            return None
        moved = sum(parameter.device != before[name] for name, parameter in model.named_parameters())
        return Outcome(True, f"{type(error).__name__}: {error} ({moved} tensors moved)")
    return Outcome(True, "moved without an error")


def reproduce(workspace: Workspace) -> Outcome:
    from peft import PeftModel

    from gemma4_compat._reproduction.workspace import difference

    base = workspace.split()
    found = _refusal(base, base.cpu)  # first alone: without other patches, PEFT's load undoes the offload
    if found is not None:
        return found
    model = PeftModel.from_pretrained(base, workspace.adapter("language"))
    for move in (model.cpu, functools.partial(model.to, workspace.main), functools.partial(model.to, "cpu")):
        found = _refusal(model, move)
        if found is not None:
            return found
    reference = workspace.outputs(PeftModel.from_pretrained(workspace.load(), workspace.adapter("language")))
    return Outcome.of_parity(difference(reference, workspace.outputs(model)), "four refused moves change nothing")


PATCH = Patch(
    id="accelerate-move-offloaded",
    kind=Kind.REFUSAL,
    severity=Severity.CRASH,
    failure_points=("F3",),
    distribution="accelerate",
    affected=">=1.12",
    acts_on=ActsOn.EVERY_MODEL,
    after=("accelerate-offload-folder",),
    targets=(Target(module="accelerate.big_modeling", name="dispatch_model", replacement=dispatch_model),),
    reproduce=reproduce,
)
