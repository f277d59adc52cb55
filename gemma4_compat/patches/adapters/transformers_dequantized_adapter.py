"""Adapters can be merged, trained and exchanged after the model below them is dequantized.

Symptom: ``AttributeError: 'Parameter' object has no attribute 'quant_state'`` (8-bit: ``'Linear' object has no
attribute 'state'``) from ``merge_and_unload``, ``merge_adapter`` and, for some tuners, the forward after
``peft_model.dequantize()`` (a method of the transformers model below). IA3 refuses: ``Cannot merge ia3 layers when
the model is loaded in 4-bit mode``. Without any error, every dequantized base weight is trainable from then on, and
``is_loaded_in_4bit`` stays True.

Cause: ``dequantize_and_replace`` replaces the bitsandbytes layer inside the adapter layer with an ``nn.Linear``. The
adapter layer itself is still PEFT's variant for bitsandbytes, which unpacks its base weight.

Fix: Once the base layers are plain, each adapter layer becomes PEFT's plain variant, the same as when the adapter is
loaded onto the dequantized model. Adapters, their parameters and hooks stay the same objects. Frozen weights stay
frozen, and ``is_loaded_in_4bit`` and ``is_loaded_in_8bit`` become False. In a model without adapters the dequantized
weights stay trainable, as upstream leaves them.

Quantized layers whose weights are offloaded cannot be dequantized; transformers fails there with half of the model
replaced. The patch raises one error before anything is replaced.

Remove when: ``dequantize()`` leaves adapter layers that can be merged: it replaces them too, or PEFT's layers look
at their base layer.
"""

from typing import Any

from gemma4_compat._errors import OffloadedWeightsError
from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat._gemma4.quantization.plain_layers import is_quantized, make_plain
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F6", severity="crash", affected=">=5.5", acts_on="every model", requires="peft bitsandbytes")


@PATCH.replaces("transformers.integrations.bitsandbytes", "dequantize_and_replace")
def dequantize_and_replace(original: Original, model: Any, *args: Any, **kwargs: Any) -> Any:
    quantized = {name: module for name, module in model.named_modules() if is_quantized(module)}
    _refuse_offloaded(quantized)
    adapted = [module for module in model.modules() if hasattr(module, "get_base_layer")]
    frozen = [name for name, module in quantized.items() if not module.weight.requires_grad]
    model = original(model, *args, **kwargs)
    for flag in ("is_loaded_in_4bit", "is_loaded_in_8bit"):
        if getattr(model, flag, False):
            setattr(model, flag, False)
    exchanged = {model.get_submodule(name) for name in quantized}
    if adapted:
        for name in frozen:
            model.get_submodule(name).weight.requires_grad_(False)
    for layer in adapted:
        if layer.get_base_layer() in exchanged:
            make_plain(layer)
    return model


def _refuse_offloaded(quantized: dict[str, Any]) -> None:
    offloaded = [name for name, module in quantized.items() if module_hooks.is_offloaded(module)]
    if offloaded:
        raise OffloadedWeightsError(
            f"dequantize: the weights of {len(offloaded)} quantized layers are offloaded, {offloaded[0]!r} among "
            "them, and would be four times (8-bit: twice) as large in host memory or on disk. Nothing was changed. "
            "Load the model with everything on one device, device_map={'': 0} or {'': 'cpu'}, and dequantize it "
            "there; to merge an adapter, load the base model without quantization_config."
        )


def reproduce(workspace: Workspace) -> Outcome:
    import copy

    from peft import PeftModel

    found = []
    for quantization in ("4bit", "8bit"):
        base = workspace.load(quantization)
        base.dequantize()
        reference = PeftModel.from_pretrained(base, workspace.adapter("all")).merge_and_unload()
        model = PeftModel.from_pretrained(workspace.load(quantization), workspace.adapter("all"))
        model.dequantize()
        trainable = sum(parameter.requires_grad for parameter in model.parameters())
        merged = copy.deepcopy(model).merge_and_unload()
        if trainable:
            return Outcome(True, f"{trainable} base weights are trainable after dequantize()")
        found.append(workspace.difference(workspace.outputs(reference), merged))
    return Outcome.of_parity(max(found), "an adapter merged after dequantize(), as one loaded after it")
