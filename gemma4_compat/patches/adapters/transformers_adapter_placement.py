"""The load_adapter of transformers puts adapter weights where their layers compute.

Symptom: silent: after ``model.load_adapter(...)`` of transformers on a model that is partly on disk or the CPU, the
outputs are garbage: the adapter weights of offloaded layers stay on meta. With a GPU, ``RuntimeError: Expected all
tensors to be on the same device, but found at least two devices, cuda:0 and cpu``.

Cause: ``PeftAdapterMixin.load_adapter`` loads the adapter's tensors with the ``hf_device_map`` of the base. Adapter
weights under a "disk" entry are treated as offloaded and stay on meta. Those under a "cpu" entry are put on the CPU,
while their layer computes on the GPU.

Fix: While the adapter loads, the map names the device where each module *computes* instead of the one where its
weights are stored. If the hooks were removed but the map was left behind, it names the device where the weights are.
The map is restored afterwards. Base weights that the adapter brings (its embeddings) replace those that accelerate's
hook reads. The patch that keeps PEFT from dispatching a base model again creates the adapter layers in the right
place.

Remove when: ``PeftAdapterMixin.load_adapter`` loads adapter weights onto the execution device of their layer.
"""

from typing import Any

from gemma4_compat._gemma4.accelerate.module_hooks import map_owner, offload_hook
from gemma4_compat._offload.weights import stored_weights
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F3 F13",
    severity="wrong_result",
    affected=">=5.5",
    acts_on="every model",
    requires="peft",
    needs="peft-keep-dispatch",
)


@PATCH.replaces("transformers.integrations.peft", "PeftAdapterMixin.load_adapter")
def load_adapter(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    if map_owner(self) is not self:
        return original(self, *args, **kwargs)
    placement = self.hf_device_map
    main = _main_device(self)
    self.hf_device_map = {
        name: device if device not in ("cpu", "disk") else _device(self, name, device) if main is None else main
        for name, device in placement.items()
    }
    try:
        with stored_weights.replaced(self):  # an adapter may bring the embeddings of its base
            return original(self, *args, **kwargs)
    finally:
        self.hf_device_map = placement


def _main_device(model: Any) -> Any:
    """The device on which accelerate computes offloaded modules; it is the same for all, so the first hook decides."""
    for module in model.modules():
        hook = offload_hook(module)
        if hook is not None and hook.execution_device is not None:
            return hook.execution_device
    return None


def _device(model: Any, name: str, default: Any) -> Any:
    """Where the weights under ``name`` are after the hooks were removed and the map is outdated."""
    prefix = f"{name}." if name else ""
    return next((value.device for key, value in model.named_parameters() if f"{key}.".startswith(prefix)), default)


def reproduce(workspace: Workspace) -> Outcome:
    adapter = str(workspace.adapter("all"))
    model = workspace.load()
    try:
        model.load_adapter(adapter)
    except (ImportError, ValueError) as error:  # incompatible releases of transformers and PEFT
        return Outcome(False, f"load_adapter does not run here, on one device either: {error}", applicable=False)
    reference = workspace.outputs(model)
    model = workspace.split()
    placement = dict(model.hf_device_map)
    model.load_adapter(adapter)
    if model.hf_device_map != placement:
        return Outcome(True, f"hf_device_map of {len(placement)} entries became {model.hf_device_map}")
    lost = [name for name, parameter in model.named_parameters() if "lora_" in name and parameter.is_meta]
    if lost:
        return Outcome(True, f"{len(lost)} LoRA weights are on meta, their values lost")
    return Outcome.of_parity(workspace.difference(reference, model), "model.load_adapter on a split base")
