"""Per-layer embeddings are added to their projection on the projection's device.

Symptom: ``RuntimeError: Expected all tensors to be on the same device`` from every forward of an E2B or E4B, in
``project_per_layer_inputs``, if a device map puts ``embed_tokens_per_layer`` and ``per_layer_projection_norm`` on
different GPUs.

Cause: ``Gemma4TextModel.project_per_layer_inputs`` adds the outputs of the two modules. accelerate's hooks bring
inputs to the device of their module, and leave its output there.

Fix: The embeddings go to the device of the projection before the two are added.

Remove when: ``project_per_layer_inputs`` brings both to one device in all supported releases of transformers.
"""

from typing import Any

from gemma4_compat._gemma4.accelerate import hooked, module_hooks
from gemma4_compat.patches.api import MODELING_GEMMA4, Original, Outcome, Patch, Workspace

PATCH = Patch("F79", severity="crash", affected=">=5.5.0", requires="accelerate")
PATCH.replaces(**hooked.ADD_HOOK)(hooked.activator(PATCH.id))


@PATCH.replaces(MODELING_GEMMA4, "Gemma4TextModel.project_per_layer_inputs", dormant=hooked.no_hooks)
def project_per_layer_inputs(original: Original, self: Any, inputs_embeds: Any, per_layer_inputs: Any = None) -> Any:
    if per_layer_inputs is not None:
        device = module_hooks.hook_device(self.per_layer_projection_norm)
        if device is not None and device != per_layer_inputs.device:
            per_layer_inputs = per_layer_inputs.to(device)
    return original(self, inputs_embeds, per_layer_inputs)


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._lab import tiny
    from gemma4_compat._lab.stand_ins import second_device

    workspace.needs_second_device()
    workspace.needs("per_layer_embeddings")
    expected = workspace.outputs(tiny.load(workspace.checkpoint), device="cpu")
    found = 0.0
    with second_device.second_device():
        for names in (["embed_tokens_per_layer"], ["per_layer_model_projection", "per_layer_projection_norm"]):
            there = [f"model.language_model.{name}" for name in names]
            model = tiny.dispatch_to_two(tiny.load(workspace.checkpoint), second_device.DEVICE, there)
            found = max(found, workspace.difference(expected, model, device="cpu"))
    return Outcome.of_parity(found, "a per-layer embedding on another device than its projection")
