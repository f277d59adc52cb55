"""``load_state_dict`` of a 4-bit model loads the scales that its ``state_dict`` saves.

Symptom: ``RuntimeError: Unexpected key(s) in state_dict: "layers.0.self_attn.q_proj.weight.absmax",
"layers.0.self_attn.q_proj.weight.quant_map"`` from ``load_state_dict`` with the model's own state dict, and from
``Accelerator.load_state``. With ``strict=False``,
silent: the packed bytes of another 4-bit model are loaded, and read with the old scales. With ``assign=True`` weights
also lose their scales.

Cause: ``Linear4bit`` saves the scales of its weight beside the packed bytes, but has no method that loads them.

Fix: Each 4-bit layer of a Gemma 4 model, and experts in 4 bits, take their scales out of the state dict while it is
their turn, and have them afterwards, on their device or on the host if they are offloaded. A weight of another shape
with as many bytes is an error; so are scales of which a part is missing, as before.

Remove when: ``Linear4bit._load_from_state_dict`` loads the scales.
"""

from typing import Any

from gemma4_compat._gemma4.models import family
from gemma4_compat._gemma4.quantization import scale_loading
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F132",
    severity="crash",
    affected=">=5.5",
    requires="bitsandbytes",
    after="transformers-compute-dtype transformers-quantized-experts",
)


@PATCH.replaces("transformers.quantizers.quantizer_bnb_4bit", "Bnb4BitHfQuantizer._process_model_after_weight_loading")
def process_model_after_weight_loading(original: Original, self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    processed = original(self, model, *args, **kwargs)
    if family.has_parts(model):
        scale_loading.install(model)
    return processed


def reproduce(workspace: Workspace) -> Outcome:
    model = workspace.load("4bit-double")
    expected = workspace.outputs(model)
    model.load_state_dict(model.state_dict())
    return Outcome.of_parity(workspace.difference(expected, model), "a 4-bit model, its state loaded again")
