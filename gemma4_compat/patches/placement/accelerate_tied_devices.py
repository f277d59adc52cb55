"""Modules that share a weight compute on one device, where the weight is.

Symptom: ``RuntimeError: Expected all tensors to be on the same device`` from every forward of a model that was
dispatched with ``embed_tokens`` and the ``lm_head`` tied to it on different devices.

Cause: ``dispatch_model`` puts a copy of the weight on each of the devices, with a hook that brings inputs there. Then
``retie_parameters`` gives all the modules the copy of the one whose name comes first in the alphabet, but leaves the
hooks of the others unchanged.

Fix: The copy on the main device is kept, if there is one, and the others are freed. All the modules compute where it
is, and it is a single trainable parameter. A block all of whose weights are shared, such as a layer of a
DiffusionGemma, computes there as a whole.

Remove when: ``retie_parameters`` leaves no module with a weight on another device than its hook says.
"""

from typing import Any

from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat._gemma4.models import walk
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F82", severity="crash", affected=">=1.12", acts_on="every model")


@PATCH.replaces("accelerate.utils.modeling", "retie_parameters")
def retie_parameters(original: Original, model: Any, tied_params: Any) -> None:
    main = module_hooks.hook_device(model)
    if main is None:
        original(model, tied_params)
        return
    # Upstream takes the first entry that is not offloaded.
    original(model, [sorted(group, key=lambda name: _weight(model, name).device != main) for group in tied_params])
    for group in tied_params:
        for name in group:
            device = _weight(model, name).device
            if device.type != "meta":
                _compute_on(device, model, name.rpartition(".")[0])
    for name, module in model.named_modules() if tied_params else ():
        weights = list(module.parameters())
        if name and weights and all(weight.device == main for weight in weights):
            _compute_on(main, model, name)  # a block all of whose weights are shared


def _weight(model: Any, name: str) -> Any:
    owner, _, attribute = name.rpartition(".")
    return getattr(model.get_submodule(owner), attribute)


def _compute_on(device: Any, model: Any, name: str) -> None:
    """Have the module ``name``, with the adapters around it, compute on ``device`` unless it is offloaded."""
    module = model.get_submodule(name)
    if module_hooks.offload_hook(module) is not None or module_hooks.hook_device(module) in (None, device):
        return
    while name and walk.wrapped(around := model.get_submodule(name := name.rpartition(".")[0])):
        module = around
    for part in walk.modules(module):
        hook = module_hooks.computing_hook(part)
        if hook is not None:
            for copies in (hook.tied_params_map or {}).values():
                copies.pop(hook.execution_device, None)
            hook.execution_device = device
            hook.init_hook(part)


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._lab import tiny
    from gemma4_compat._lab.stand_ins import second_device

    workspace.needs_second_device()
    expected = workspace.outputs(tiny.load(workspace.checkpoint), device="cpu")
    with second_device.second_device():
        model = tiny.dispatch_to_two(tiny.load(workspace.checkpoint), second_device.DEVICE, ["lm_head"])
        found = workspace.difference(expected, model, device="cpu")
    return Outcome.of_parity(found, "a head on another device than the embedding tied to it")
