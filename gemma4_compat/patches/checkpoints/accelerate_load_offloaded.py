"""``load_state_dict`` of a model with offloaded modules also loads their weights.

Symptom: silent: ``load_state_dict`` of a dispatched model returns ``<All keys matched successfully>``, but modules on
the CPU or on disk keep their old weights. For each of them torch warns of ``copying from a non-meta parameter in the
checkpoint to a meta parameter in the current model, which is a no-op``. With ``assign=True`` the modules have the new
weights until their first forward, which computes with the old ones.

Cause: Between two forwards the parameters of an offloaded module are on meta. Their values are in the ``weights_map``
of accelerate's hook, which torch does not know.

Fix: For the load, each offloaded module gets parameters to load into. What torch has loaded into them, after all its
checks, is stored where the old values were: in host memory, or in a new file in the offload folder. If a device map
separates two tied weights, both are loaded, as on one device. An entry on meta, as in the model's own state dict, has
no value and keeps the stored one.

Remove when: accelerate's hooks accept what ``load_state_dict`` loads.
"""

from typing import Any

from gemma4_compat._gemma4.models import family
from gemma4_compat._gemma4.quantization import scale_loading
from gemma4_compat._offload.weights import state_loading
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F48",
    severity="wrong_result",
    affected=">=1.12",
    after="accelerate-skip-keys accelerate-nested-map accelerate-offload-folder",
)


@PATCH.replaces("accelerate.big_modeling", "dispatch_model")
def dispatch_model(original: Original, model: Any, *args: Any, **kwargs: Any) -> Any:
    dispatched = original(model, *args, **kwargs)
    if family.has_parts(dispatched):
        state_loading.install(dispatched)
        scale_loading.renew(dispatched)
    return dispatched


def reproduce(workspace: Workspace) -> Outcome:
    import torch

    other = workspace.load()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    model = workspace.load_unmarked()
    model = workspace.dispatch(model, "layers")
    matched = model.load_state_dict(other.state_dict())
    found = workspace.difference(*(workspace.outputs(each, text_only=True) for each in (other, model)))
    return Outcome.of_parity(found, f"layers offloaded, other weights loaded, {matched}")
