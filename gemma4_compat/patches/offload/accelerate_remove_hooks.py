"""``AttributeError: 'PeftModel' object has no attribute '_hf_hook'`` when accelerate's hooks are removed from a model
that PEFT has wrapped; and silent: on one that was loaded from disk, the weights stay on meta and nothing can bring
them in any more (``Tensor on device meta is not on the expected device`` at the next forward).

Why: ``remove_hook_from_module`` asks ``hasattr(module, "_hf_hook")``, which PEFT's wrappers pass on to the module they
hold, and then deletes the attribute from the wrapper. ``AlignDevicesHook.detach_hook`` puts weights back where they
were before they were offloaded, and skips those that were never anywhere but on disk.

Here: a wrapper that has no hook of its own is passed over; the module it holds has its own turn. Weights that were
only on disk are read into host memory, where they are exact and crowd no card; ``model.to(...)`` moves them on.

Goes when accelerate looks at a module's own attributes and materializes such weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gemma4_compat._engine.patch import Outcome, Patch, Severity, Target
from gemma4_compat._offload import idle_hooks, streaming

if TYPE_CHECKING:
    from gemma4_compat._reproduction.workspace import Workspace


def remove_hook_from_module(original: Callable[..., Any], module: Any, recurse: bool = False) -> Any:
    own = vars(module)
    if not any(name not in own and hasattr(module, name) for name in ("_hf_hook", "_old_forward")):
        return original(module, recurse)
    if recurse:
        from accelerate.hooks import remove_hook_from_module as remove

        for child in module.children():
            remove(child, recurse=True)
    return module


def detach_hook(original: Callable[..., Any], self: Any, module: Any) -> Any:
    streaming.forget(module)
    idle_hooks.uninstall(module)
    detached = original(self, module)
    if not self.offload or self.weights_map is None:
        return detached
    from accelerate.utils import set_module_tensor_to_device
    from accelerate.utils.modeling import named_module_tensors

    for name, tensor in list(named_module_tensors(module, recurse=self.place_submodules)):
        if tensor.device.type == "meta" and self.original_devices[name].type == "meta":
            value = self.weights_map.get(name)
            if value is not None:
                set_module_tensor_to_device(module, name, "cpu", value=value)
    return detached


def reproduce(workspace: Workspace) -> Outcome:
    import tempfile

    from accelerate.hooks import remove_hook_from_submodules
    from peft import PeftModel

    from gemma4_compat._reproduction import tiny
    from gemma4_compat._reproduction.workspace import difference

    reference = workspace.answers(workspace.load())
    device_map = tiny.device_map(workspace.load(), "both", main=workspace.main, offloaded="disk")
    folder = tempfile.mkdtemp(dir=workspace.folder)
    model = tiny.load(workspace.checkpoint, device_map=device_map, offload_folder=folder)
    remove_hook_from_submodules(model)
    left = [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]
    if left:
        return Outcome(True, f"{len(left)} weights stay on meta without a hook, {left[0]} among them")
    found = difference(reference, workspace.answers(model.to(workspace.main)))
    remove_hook_from_submodules(PeftModel.from_pretrained(workspace.split(), workspace.adapter("language")))
    return Outcome.of_parity(found, "hooks removed from a model loaded from disk")


PATCH = Patch(
    id="accelerate-remove-hooks",
    summary="removing accelerate's hooks brings every weight back, PEFT wrappers included",
    symptom="AttributeError: 'PeftModel' object has no attribute '_hf_hook'; weights loaded from disk stay on meta "
    "without a hook, and the next forward raises",
    severity=Severity.CRASH,
    failure_points=("F3",),
    distribution="accelerate",
    affected=">=1.12",
    measured="1.15.0",
    retire_when="accelerate brings disk-offloaded weights back and looks at a module's own hook",
    targets=(
        Target(
            module="accelerate.hooks",
            name="remove_hook_from_module",
            replacement=remove_hook_from_module,
            known={"54fed7a0958c": "1.12.0 - 1.15.0"},
        ),
        Target(
            module="accelerate.hooks",
            name="AlignDevicesHook.detach_hook",
            replacement=detach_hook,
            known={"7aa61176b25b": "1.12.0 - 1.13.0", "805c8034e543": "1.14.0 - 1.15.0"},
        ),
    ),
    reproduce=reproduce,
)
