"""``load_state_dict`` of an 8-bit model also works after its first forward.

Symptom: ``RuntimeError: Loading a quantized checkpoint into non-quantized Linear8bitLt is not supported. Please call
module.cuda() before module.load_state_dict()`` from ``load_state_dict`` with the model's own state dict, and from
``Accelerator.load_state``, once the model has computed something.

Cause: The first forward of ``Linear8bitLt`` moves the scales from the parameter to the layer's state, from where they
are saved. To load them, the layer looks only at the parameter.

Fix: During the load the parameter has the scales of the state. They are loaded in place, as before the first forward.

Remove when: ``Linear8bitLt._load_from_state_dict`` looks for the scales in the layer's state.
"""

from typing import Any

from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F95", severity="crash", affected=">=0.48.2", acts_on="every model")


@PATCH.replaces("bitsandbytes.nn.modules", "Linear8bitLt._load_from_state_dict")
def load_from_state_dict(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    weight, scales = self.weight, self.state.SCB
    if scales is None or getattr(weight, "SCB", None) is not None:
        return original(self, *args, **kwargs)
    weight.SCB = scales
    try:
        return original(self, *args, **kwargs)
    finally:
        weight.SCB = None


def reproduce(workspace: Workspace) -> Outcome:
    import torch

    model = workspace.load("8bit")
    expected = workspace.outputs(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name.endswith("SCB"):
                value.mul_(2)
    model.load_state_dict(state)
    return Outcome.of_parity(workspace.difference(expected, model), "an 8-bit model, its state loaded again")
