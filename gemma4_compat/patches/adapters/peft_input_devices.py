"""An adapter on a module whose input comes from another device computes on the device of that module.

Symptom: ``RuntimeError: Expected all tensors to be on the same device`` from a forward of a model on several GPUs,
with LoRA or another tuner on ``lm_head``, ``embed_tokens`` or ``embed_tokens_per_layer``, with
``trainable_token_indices``, or with ``modules_to_save`` and ``ensure_weight_tying``.

Cause: accelerate's hook brings inputs to the device of the module that it is attached to. PEFT's layer around that
module, or the copy that replaces it, has no such hook and computes with the input as it arrives. Inside a decoder
layer that is the right device, because the hook of the layer has brought it there. A module with its own entry in the
device map has no such layer around it.

Fix: After adapters are created, PEFT's layer around a module that is the first on its device brings its inputs there,
and a copy that replaces a module gets a hook like that module's. Outputs stay where upstream leaves them. Nothing
changes for a model on one device, or for a layer whose inputs arrive on its device anyway.

Remove when: PEFT brings inputs to the device of the base layer in all supported releases.
"""

from typing import Any

from gemma4_compat._gemma4.accelerate import attached, module_hooks
from gemma4_compat._gemma4.models import walk
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F80",
    severity="crash",
    affected=">=0.18.0",
    acts_on="every model",
    requires="accelerate",
    after="peft-keep-dispatch",
)

_REGISTERED = attached.BRINGS_INPUTS


@PATCH.replaces("peft.tuners.tuners_utils", "BaseTuner.inject_adapter")
# It wraps the head that is tied to the embedding afterwards.
@PATCH.replaces("peft.tuners.trainable_tokens.model", "TrainableTokensModel.inject_adapter")
def inject_adapter(original: Original, self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, model, *args, **kwargs)
    for layer in _entrances(model)[1]:
        if hasattr(layer, "modules_to_save"):
            _hook_copies(layer)
        elif not vars(layer).get(_REGISTERED):
            layer.register_forward_pre_hook(_bring_inputs, with_kwargs=True)
            vars(layer)[_REGISTERED] = True
    return result


def _entrances(module: Any) -> tuple[set[Any], list[Any]]:
    """The devices on which ``module`` and everything in it compute, and the PEFT layers whose inputs no outer hook
    brings there.

    An outer hook does so if everything below it is on its device.
    """
    devices: set[Any] = set()
    found: list[Any] = []
    for child in module._modules.values():
        if child is not None:
            below, layers = _entrances(child)
            devices |= below
            found += layers
    # Not if a wrapper only exposes the hook of the module inside it.
    own = module_hooks.hook_device(module) if "_hf_hook" in vars(module) else None
    if own is not None:
        devices.add(own)
        if devices == {own}:
            found = []
    elif walk.wrapped(module):
        found = [module] if devices else []
    return devices, found


def _bring_inputs(layer: Any, args: Any, kwargs: Any) -> Any:
    device = module_hooks.hook_device(walk.innermost(layer))
    if device is None:  # accelerate's hooks were removed
        return None
    from accelerate.utils import send_to_device

    return send_to_device(args, device), send_to_device(kwargs, device)


def _hook_copies(wrapper: Any) -> None:
    """A copy has the hook of the module it was copied from; a copy made for a tied weight has no hook."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    device = module_hooks.hook_device(wrapper.original_module)
    for copied in wrapper.modules_to_save.values():
        if device is not None and "_hf_hook" not in vars(copied):
            add_hook_to_module(copied, AlignDevicesHook(execution_device=device))


def reproduce(workspace: Workspace) -> Outcome:
    import inspect

    import peft

    from gemma4_compat._lab import tiny, tiny_adapters
    from gemma4_compat._lab.stand_ins import second_device

    workspace.needs_second_device()
    cases: list[dict[str, Any]] = [
        {"target_modules": ["lm_head"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [3, 4, 5]},
    ]
    if "ensure_weight_tying" in inspect.signature(peft.LoraConfig).parameters:
        copies = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
        cases.append({"target_modules": ["q_proj"], **copies})

    def tuned(options: dict[str, Any], *, split: bool) -> Any:
        model = tiny.load(workspace.checkpoint)
        if split:  # the head gets its input from the other device
            model = tiny.dispatch_to_two(model, second_device.DEVICE, ["model.language_model.norm"])
        return tiny_adapters.tuned(model, peft.LoraConfig(**options))

    found = 0.0
    with second_device.second_device():
        for options in cases:
            whole, several = (
                workspace.outputs(tuned(options, split=there), text_only=True, device="cpu") for there in (False, True)
            )
            found = max(found, workspace.difference(whole, several))
    return Outcome.of_parity(found, "adapters on a head whose input comes from another device")
