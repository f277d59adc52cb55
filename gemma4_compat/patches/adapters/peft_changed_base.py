"""Warns when a LoRA initialization changes base weights and cannot be reloaded or requantized exactly.

Symptom: silent: an adapter created with ``init_lora_weights="pissa_niter_4"`` gives different outputs once it is
saved and loaded again. An adapter created with ``"olora"`` on a 4-bit or 8-bit base gives different outputs from the
base model even before it is trained.

Cause: Both move a part of the base weights into the adapter. ``LoraLayer.pissa_init`` with ``pissa_niter_N`` draws
that part at random, when the adapter is created and again when it is loaded, and the part is not saved.
``LoraLayer.olora_init`` quantizes the remainder of a 4-bit or 8-bit weight again.

Fix: On Gemma 4 models each case gives one warning when the adapter is created or loaded, early enough to follow its
advice. Weights and outputs stay upstream's.

Remove when: PEFT saves the part that ``pissa_niter`` took (or its seed), and reports what OLoRA loses on quantized
weights.
"""

from typing import Any

from gemma4_compat._engine.io import notice
from gemma4_compat._gemma4.models import family
from gemma4_compat._gemma4.quantization.plain_layers import is_quantized
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F4",
    kind="notice",
    severity="wrong_result",
    affected=">=0.18.0",
    requires="bitsandbytes transformers>=5.5",
    after="peft-quantized-tuners",
)


@PATCH.replaces("peft.tuners.tuners_utils", "BaseTuner.inject_adapter")
def inject_adapter(original: Original, self: Any, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
    result = original(self, model, adapter_name, *args, **kwargs)
    init = getattr(self.peft_config[adapter_name], "init_lora_weights", None)
    if isinstance(init, str) and family.has_parts(model):
        text = _warning(init.lower(), model, adapter_name)
        if text is not None:
            notice.warn_user(text)
    return result


def _warning(init: str, model: Any, adapter_name: str) -> str | None:
    if init.startswith("pissa_niter_"):
        return (
            f"init_lora_weights={init!r} takes a random part out of the base weights and makes it the adapter "
            f"{adapter_name!r}. It is another part each time: saved and loaded again, the model gives different "
            "outputs. Use init_lora_weights='pissa', which is exact. Or make it a LoRA adapter of the unchanged base: "
            "before training, set init_lora_weights=True in its config and save it; after training, give that folder "
            "to save_pretrained as path_initial_model_for_weight_conversion."
        )
    if init != "olora":
        return None
    count = sum(
        is_quantized(layer.get_base_layer())
        for layer in model.modules()
        if hasattr(layer, "get_base_layer") and adapter_name in getattr(layer, "lora_A", ())
    )
    if not count:
        return None
    return (
        f"init_lora_weights='olora' took a part out of {count} quantized weights, and they were quantized again: the "
        "model gives different outputs than the base model, even before training. "
        "To start from the base model as it is, use init_lora_weights=True."
    )


def reproduce(workspace: Workspace) -> Outcome:
    import warnings

    from peft import LoraConfig, PeftModel, get_peft_model

    from gemma4_compat._errors import Gemma4CompatWarning

    targets = ["up_proj"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = LoraConfig(r=4, target_modules=targets, init_lora_weights="pissa_niter_4")
        trained = get_peft_model(workspace.load(), config).eval()
        olora = LoraConfig(r=4, target_modules=targets, init_lora_weights="olora")
        quantized = get_peft_model(workspace.load("4bit"), olora).eval()
    said = sum(issubclass(warning.category, Gemma4CompatWarning) for warning in caught)
    if said == 2:
        return Outcome(False, "one warning for pissa_niter_4 and one for olora on a 4-bit base")
    folder = workspace.new_folder()
    trained.save_pretrained(folder)
    again = PeftModel.from_pretrained(workspace.load(), folder)
    moved = workspace.difference(workspace.outputs(trained), again.eval())
    changed = workspace.difference(workspace.reference("4bit"), quantized)
    if moved == 0.0 and changed == 0.0:
        return Outcome(False, "pissa_niter_4 is loaded as it was saved, and olora leaves a 4-bit base as it is")
    return Outcome(
        True,
        f"nothing is said where pissa_niter_4 reloads with logits {moved:.3g} away, and olora on a 4-bit base "
        f"starts {changed:.3g} away",
    )
