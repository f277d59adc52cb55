"""AdaLoRA allocates ranks when some adapted layers, such as the towers', took no part in a training step.

Symptom: ``TypeError: unsupported operand type(s) for *: 'Parameter' and 'NoneType'`` from AdaLoRA's
``update_and_allocate``, after a step in which an adapted layer took no part. Targets such as ``all-linear`` or
``q_proj`` reach the vision and audio towers, and a text-only batch leaves those without gradients.

Cause: ``RankAllocator.update_ipt`` computes the importance of a weight as its value times its gradient. It does not
treat a missing gradient as zero.

Fix: A missing gradient counts as zero while the importance is updated, and is ``None`` again afterwards. Layers that
no batch uses are the first to lose their rank.

Remove when: ``RankAllocator.update_ipt`` skips weights without gradients.
"""

from typing import Any

from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F4", severity="crash", affected=">=0.18.0", acts_on="every model", requires="transformers>=5.5")


@PATCH.replaces("peft.tuners.adalora.layer", "RankAllocator.update_ipt")
def update_ipt(original: Original, self: Any, model: Any) -> Any:
    import torch

    unused = [
        parameter
        for name, parameter in model.named_parameters()
        if "lora_" in name and self.adapter_name in name and parameter.grad is None
    ]
    for parameter in unused:
        parameter.grad = torch.zeros_like(parameter)
    try:
        return original(self, model)
    finally:
        for parameter in unused:
            parameter.grad = None


def reproduce(workspace: Workspace) -> Outcome:
    from peft import AdaLoraConfig, get_peft_model

    from gemma4_compat._lab import tiny_adapters

    config = AdaLoraConfig(init_r=4, target_r=2, total_step=10, target_modules=tiny_adapters.TARGETS["language"])
    model = get_peft_model(workspace.load(), config)
    batch = workspace.inputs(text_only=True)
    model.base_model.model.model.language_model.layers[0].requires_grad_(False)  # like a layer that no batch reaches
    model(**batch, labels=batch["input_ids"]).loss.backward()
    model.base_model.update_and_allocate(1)
    importance = model.base_model.rankallocator.ipt
    unused = [name for name in importance if ".layers.0." in name]
    lost = [name for name in unused if importance[name].abs().max() != 0]
    if not unused or lost:
        return Outcome(True, f"{len(lost)} of {len(unused)} weights without a gradient have an importance")
    return Outcome(False, f"{len(unused)} weights without a gradient have no importance", 0.0)
