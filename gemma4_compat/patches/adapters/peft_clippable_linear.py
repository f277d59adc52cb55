"""Adapters reach the linears inside Gemma 4's clipped vision and audio layers.

Symptom: ``ValueError: Target module Gemma4ClippableLinear(...) is not supported`` from ``get_peft_model`` and from
every adapter load whose target names (``q_proj``, ``up_proj``, ...) reach into the vision or audio tower.

Cause: The towers wrap their linears in ``Gemma4ClippableLinear``, which clamps input and output and is not an
``nn.Linear``. PEFT chooses the adapter layer by the type of the target.

Fix: Just before PEFT matches names, in ``_maybe_include_all_linear_layers``, the patch rewrites the config to
exclude a wrapper and target its inner ``.linear`` instead. The clamps stay around the adapted layer. A wrapper and
its inner layer that both match are adapted once. ``rank_pattern``, ``alpha_pattern`` and IA3's
``feedforward_modules`` follow.

Keys read ``...q_proj.linear.lora_A.weight``, as in adapters created elsewhere. The saved config names the same
layers, so the adapter also loads in a PEFT without this patch.

Remove when: PEFT adapts ``Gemma4ClippableLinear``, or transformers makes it an ``nn.Linear``; no release does so
far.
"""

from typing import Any

from gemma4_compat._gemma4.adapters import clipped
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F4", severity="crash", affected=">=0.18.0", bug="issues/3129")


@PATCH.replaces("peft.tuners.tuners_utils", "_maybe_include_all_linear_layers")
def maybe_include_all_linear_layers(original: Original, peft_config: Any, model: Any) -> Any:
    # The last step before the matching, for every tuner: "all-linear" and default targets are already resolved.
    peft_config = original(peft_config, model)
    if getattr(peft_config, "target_modules", None):
        clipped.redirect(peft_config, model)
    return peft_config


def reproduce(workspace: Workspace) -> Outcome:
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model

    workspace.needs("clipped_linears")
    explicit = PeftModel.from_pretrained(workspace.load(), workspace.adapter("all"))
    values = {name: value for name, value in explicit.state_dict().items() if "lora_" in name}
    reference = workspace.outputs(explicit)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "ffw_layer_1"]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=names)
    model = get_peft_model(workspace.load(), config)
    adapted = {name for name in model.state_dict() if "lora_" in name}
    if adapted != set(values):
        return Outcome(
            True, f"{len(adapted ^ set(values))} adapter weights differ in name from targeting .linear by hand"
        )
    with torch.no_grad():
        model.load_state_dict(values, strict=False)
    found = workspace.difference(reference, model.eval())
    return Outcome.of_parity(found, f"{', '.join(names[:2])}, ... reach {len(values) // 2} layers")
