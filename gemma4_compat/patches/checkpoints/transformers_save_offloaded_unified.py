"""A ``gemma4_unified`` model (the 12B) can be saved while its image embedder is offloaded.

Symptom: ``AttributeError: Gemma4UnifiedVisionEmbedder has no attribute `embedding_projection``` from
``save_pretrained`` of a ``gemma4_unified`` model whose image embedder is on the CPU or on disk.

Cause: The checkpoint uses other names for the tensors of that embedder than the model does. ``save_pretrained``
first renames all tensors to the names of the checkpoint. Then ``load_offloaded_parameter`` looks for the hooks of
offloaded tensors under the new names. From 5.14.0 on, transformers loads offloaded tensors before it renames them.

Fix: ``load_offloaded_parameter`` looks up a tensor that is saved under another name by the model's own name for it.
Every tensor is saved as from a model on one device, bit for bit. Names that the model has are looked up as before.

Remove when: transformers below 5.14.0 is no longer supported.
"""

from typing import Any

from gemma4_compat._gemma4.models import family
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F30",
    severity="crash",
    affected=">=5.10.1,<5.14.0",
    applied_upstream="pull/47018",
    requires="accelerate",
    after="transformers-save-tied-offloaded",  # which is given the model's own name then
)


@PATCH.replaces("transformers.integrations.accelerate", "load_offloaded_parameter")
def load_offloaded_parameter(original: Original, model: Any, param_name: str) -> Any:
    if family.is_gemma4(model) and not _has_module(model, param_name.rpartition(".")[0]):
        param_name = _own_name(model, param_name)
    return original(model, param_name)


def _has_module(model: Any, path: str) -> bool:
    for part in path.split("."):
        if part not in model._modules:
            return False
        model = model._modules[part]
    return True


def _own_name(model: Any, saved: str) -> str:
    """The model's name for a parameter that is saved as ``saved``."""
    from transformers.core_model_loading import revert_weight_conversion

    offloaded = {name: weight for name, weight in model.named_parameters() if weight.device.type == "meta"}
    weight = revert_weight_conversion(model, offloaded).get(saved)
    return next((name for name, own in offloaded.items() if own is weight), saved)


def reproduce(workspace: Workspace) -> Outcome:
    unified = workspace.unified()
    if unified is None:
        return Outcome(False, "this release has no gemma4_unified", applicable=False)
    reference, model = unified.load(), unified.split(offload="towers")
    saved = workspace.new_folder()
    model.save_pretrained(saved)
    reloaded = type(model).from_pretrained(saved, dtype=reference.dtype, device_map={"": workspace.main}).eval()
    found = unified.difference(unified.outputs(reference), reloaded)
    return Outcome.of_parity(found, "embedders offloaded, saved and loaded again")
