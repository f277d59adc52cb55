"""``NotImplementedError: Cannot copy out of meta tensor`` from ``model.cpu()`` of a partly offloaded model, and from
``.to(device)``, ``.cuda()`` or ``.cpu()`` of what wraps it (``PeftModel``), with the part before the first offloaded
module moved already: the next forward finds its tensors on two devices.

Why: accelerate guards ``to`` and ``cuda`` of the model it dispatches. It forgot ``cpu``; and a move of a wrapper goes
down the modules through ``_apply``, past the guard.

Here: a dispatched model with offloaded modules also guards its ``_apply``, the one way into every move. What the guard
raises is accelerate's own error, with the modules' names, before anything is moved. Changes of dtype pass: they move
nothing, and offloaded weights follow them when they are brought in. The guard goes when nothing is offloaded.

Goes when accelerate guards ``_apply``, or every move that comes by it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gemma4_compat._engine.patch import Outcome, Patch, Severity, Target
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._models import placement

if TYPE_CHECKING:
    from gemma4_compat._reproduction.workspace import Workspace


def dispatch_model(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    model = original(*args, **kwargs)
    if any(placement.is_offloaded(module) for module in model.modules()):
        # A partial and not a closure: a deep copy of the model gets a guard of its own.
        vars(model)["_apply"] = functools.partial(_guarded_apply, model)
    return model


def _guarded_apply(model: Any, fn: Callable[[Any], Any], *args: Any, **kwargs: Any) -> Any:
    names = [name for name, module in model.named_modules() if placement.is_offloaded(module)]
    if names and _moves(fn):
        raise Gemma4CompatError(
            f"You can't move a model that has some modules offloaded to cpu or disk ({len(names)} here, {names[0]!r} "
            "the first). Nothing was moved. accelerate.hooks.remove_hook_from_submodules(model) brings them back "
            "first; or load the model with another device_map."
        )
    if not names:
        vars(model).pop("_apply", None)
    return type(model)._apply(model, fn, *args, **kwargs)


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
    summary="an offloaded model, wrapped or not, refuses to be moved before anything is moved",
    symptom="NotImplementedError: Cannot copy out of meta tensor, with a part of the model moved",
    severity=Severity.CRASH,
    failure_points=("F3",),
    distribution="accelerate",
    affected=">=1.12",
    measured="1.15.0",
    retire_when="accelerate refuses every move of a model with offloaded modules",
    after=("accelerate-offload-folder",),
    targets=(
        Target(
            module="accelerate.big_modeling",
            name="dispatch_model",
            replacement=dispatch_model,
            known={"ce5fa56a90e1": "1.12.0", "a6f9d638158e": "1.13.0 - 1.14.0", "e7b75432dc18": "1.15.0"},
        ),
    ),
    reproduce=reproduce,
)
