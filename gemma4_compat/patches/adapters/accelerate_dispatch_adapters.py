"""A model that already has adapters can be dispatched: the adapters of offloaded layers stay on the device.

Symptom: silent: after ``dispatch_model`` of a model with adapters, those of offloaded layers get no gradient, and
``save_pretrained`` raises. A LoRA on ``embed_tokens``, or trained tokens: ``RuntimeError: Tensor on device meta is not
on the expected device``, ``Cannot copy out of meta tensor`` or, from ``dispatch_model``, ``ValueError: ... is on the
meta device, we need a `value` to put in on 0``.

Cause: ``dispatch_model`` treats an adapter as part of the layer that a map offloads. Some adapters are in containers
(``nn.ParameterDict``), which are never called, so accelerate's hook never onloads them. Embedding and head share one
container of trained tokens: one entry of the map offloads it, another wants it on the device. Layers that read the
base weight in their own forward (DoRA, trained tokens) find it on meta.

Fix: The patch hides the adapters of offloaded modules from accelerate and places them on the device where the module
computes, as if they had been loaded after the dispatch.

Remove when: ``dispatch_model`` leaves the adapters of offloaded modules on their execution device.
"""

import inspect
from typing import Any

from gemma4_compat._gemma4.models import family
from gemma4_compat._offload.weights import dispatched_adapters, merged_layers
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F13",
    severity="wrong_result",
    affected=">=1.12",
    requires="peft",
    after="accelerate-nested-map accelerate-offload-folder",
)


@PATCH.replaces("accelerate.big_modeling", "dispatch_model")
def dispatch_model(original: Original, *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    if not family.has_parts(given["model"]):
        return original(*args, **kwargs)
    with dispatched_adapters.hidden(given["model"], given["device_map"]):
        dispatched = original(*args, **kwargs)
    merged_layers.dispatched(dispatched)
    return dispatched


def reproduce(workspace: Workspace) -> Outcome:
    from peft import PeftModel

    # Not the linears of the towers, which another patch covers.
    adapter = workspace.adapter_on("embedding", r".*language_model\.(embed_tokens|.*\.up_proj)")

    def with_adapter() -> Any:
        return PeftModel.from_pretrained(workspace.load(), adapter, is_trainable=True)

    reference = workspace.outputs(with_adapter().eval(), text_only=True)
    model = with_adapter().eval()
    entries = ("model.language_model.embed_tokens", "model.language_model.layers.0")
    workspace.dispatch_map(model.get_base_model(), {"": workspace.main, **dict.fromkeys(entries, workspace.offloaded)})
    lost = [name for name, weight in model.named_parameters() if weight.requires_grad and weight.is_meta]
    if lost:
        return Outcome(True, f"{len(lost)} adapter weights are on meta and get no gradient, {lost[0]} among them")
    return Outcome.of_parity(workspace.difference(reference, model, text_only=True), "dispatched with an adapter")
