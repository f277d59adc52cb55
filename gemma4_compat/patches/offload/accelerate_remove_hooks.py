"""Removing accelerate's hooks brings every weight back, also through PEFT wrappers.

Symptom: ``AttributeError: 'PeftModel' object has no attribute '_hf_hook'`` when accelerate's hooks are removed from a
model that PEFT has wrapped. On a model that was loaded from disk, the removal raises nothing, but the weights stay on
meta without a hook that could onload them, and the next forward raises ``Tensor on device meta is not on the expected
device``. A tied ``lm_head`` then has its own weight: it is saved separately and no longer trained with the embedding.

Cause: ``remove_hook_from_module`` checks ``hasattr(module, "_hf_hook")``, which PEFT's wrappers forward to the module
they hold, and then deletes the attribute from the wrapper. ``AlignDevicesHook.detach_hook`` returns weights to where
they were before they were offloaded, module by module, and skips weights that were only ever on disk.

Fix: A wrapper without its own hook is skipped; the module it holds has its own turn. Weights that were only on disk
are read into host memory, where they are exact and take no GPU memory; ``model.to(...)`` moves them on. A weight that
was set in the meantime is kept. The halves of a tied weight become one parameter again if they have the same values.
Detaching a hook also ends this package's layer streaming for its module.

Remove when: accelerate brings disk-offloaded weights back and checks a module's own attributes for a hook.
"""

from typing import Any

from gemma4_compat._offload import model_lock
from gemma4_compat._offload.transfer import idle_hooks, streaming
from gemma4_compat._offload.weights import joined_weights, state_loading
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F3", severity="crash", affected=">=1.12", acts_on="every model")


@PATCH.replaces("accelerate.hooks", "remove_hook_from_module")
def remove_hook_from_module(original: Original, module: Any, recurse: bool = False) -> Any:
    own = vars(module)
    if not any(name not in own and hasattr(module, name) for name in ("_hf_hook", "_old_forward")):
        return original(module, recurse)
    if recurse:
        from accelerate.hooks import remove_hook_from_module as remove

        for child in module.children():
            remove(child, recurse=True)
    return module


@PATCH.replaces("accelerate.hooks", "AlignDevicesHook.detach_hook")
def detach_hook(original: Original, self: Any, module: Any) -> Any:
    model = joined_weights.model_of(module)
    streaming.forget(module)
    state_loading.forget(module)
    idle_hooks.uninstall(module)
    model_lock.uninstall(module)
    detached = original(self, module)
    if self.offload and self.weights_map is not None:
        _bring_from_disk(self, module)
    if model is not None:
        joined_weights.join(model, module)
    return detached


def _bring_from_disk(hook: Any, module: Any) -> None:
    from accelerate.utils import set_module_tensor_to_device
    from accelerate.utils.modeling import named_module_tensors

    for name, tensor in list(named_module_tensors(module, recurse=hook.place_submodules)):
        if tensor.device.type == "meta" and hook.original_devices[name].type == "meta":
            value = hook.weights_map.get(name)
            if value is not None:
                set_module_tensor_to_device(module, name, "cpu", value=value)


def reproduce(workspace: Workspace) -> Outcome:
    from accelerate.hooks import remove_hook_from_submodules
    from peft import PeftModel

    from gemma4_compat._lab import tiny

    reference = workspace.reference()
    device_map = tiny.device_map(workspace.load(), "both", main=workspace.main, offloaded="disk")
    folder = workspace.new_folder()
    model = tiny.load(workspace.checkpoint, device_map=device_map, offload_folder=folder)
    remove_hook_from_submodules(model)
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if left:
        return Outcome(True, f"{len(left)} weights stay on meta without a hook, {left[0]} among them")
    found = workspace.difference(reference, model.to(workspace.main))
    remove_hook_from_submodules(PeftModel.from_pretrained(workspace.split(), workspace.adapter("language")))
    return Outcome.of_parity(found, "hooks removed from a model loaded from disk")
