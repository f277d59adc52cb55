"""AdaLoRA does not train its number of ranks, so a saved adapter gives the same outputs when it is loaded again.

Symptom: silent: an AdaLoRA adapter trained on a bf16 base gives different outputs once it is saved and loaded again.

Cause: Each layer divides by its number of ranks (``AdaLoraLayer.ranknum``), which PEFT keeps as a frozen parameter and
does not save. If the base is not float32, ``cast_adapter_dtype`` changes its dtype by replacing it with a new,
trainable parameter; since PEFT 0.21 nothing freezes that one again. The optimizer then changes the number, but a
loaded adapter has the correct number again.

Fix: The number of ranks stays frozen. So do the weights of other tuners' adapters that were loaded for use and not
for training.

Remove when: PEFT keeps ``AdaLoraLayer.ranknum`` frozen (without a gradient) on a bf16 base.
"""

from typing import Any

from gemma4_compat._gemma4.models import walk
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F4", severity="wrong_result", affected=">=0.21.0", acts_on="every model", requires="transformers>=5.5")


@PATCH.replaces("peft.tuners.adalora.layer", "AdaLoraLayer.update_layer")
def update_layer(original: Original, self: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
    result = original(self, adapter_name, *args, **kwargs)
    self.ranknum[adapter_name].requires_grad_(False)
    return result


@PATCH.replaces("peft.tuners.tuners_utils", "cast_adapter_dtype")
def cast_adapter_dtype(original: Original, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
    frozen = [
        module._parameters
        for module in walk.modules(model)
        if adapter_name in module._parameters and not module._parameters[adapter_name].requires_grad
    ]
    result = original(model, adapter_name, *args, **kwargs)
    for parameters in frozen:
        parameters[adapter_name].requires_grad_(False)
    return result


def reproduce(workspace: Workspace) -> Outcome:
    import torch
    from peft import AdaLoraConfig, PeftModel, get_peft_model

    torch.manual_seed(0)
    targets = r".*language_model\..*\.up_proj"
    config = AdaLoraConfig(init_r=4, target_r=2, total_step=10, init_lora_weights=False, target_modules=targets)
    model = get_peft_model(workspace.load(), config)
    batch = workspace.inputs()
    optimizer = torch.optim.Adam([value for value in model.parameters() if value.requires_grad], lr=0.1)
    model(**batch, labels=batch["input_ids"]).loss.backward()
    optimizer.step()
    folder = workspace.new_folder()
    model.save_pretrained(folder)
    again = PeftModel.from_pretrained(workspace.load(), folder)
    found = workspace.difference(workspace.outputs(model.eval()), again.eval())
    return Outcome.of_parity(found, "AdaLoRA after one step, saved and loaded again")
