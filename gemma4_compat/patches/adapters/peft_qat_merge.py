"""DoRA runs on the layers of a QAT checkpoint; a merge into them is refused with a way to merge.

Symptom: ``RuntimeError: The size of tensor a (32) must match the size of tensor b (64)`` from ``merge_and_unload()``
and ``merge_adapter()``, or ``result type Float can't be cast to the desired output type Char``, with part of the model
already merged. The same size error from ``get_peft_model`` and ``PeftModel.from_pretrained`` with ``use_dora=True``;
8-bit layers raise nothing and get magnitudes that are norms of integers.

Cause: ``QuantizedLinear`` inherits from ``nn.Linear``, so PEFT treats it as one and adds the adapter's change to its
packed integers.

Fix: ``dequantize_module_weight``, through which DoRA reads a base weight, returns the values that the layer computes
with, in the model's dtype. A merge cannot be exact: no integer that such a layer stores is the exact sum with an
adapter, and the layer rounds its activations, which an adapter beside it does not. So a merge is refused before
anything is changed, and the error says how to merge: into the model that ``dequantize()`` returns. So is a merge into
layers of compressed-tensors that stay packed (``transformers-packed-layers``).

Remove when: PEFT dequantizes layers whose weights are packed integers, and refuses to merge into them.
"""

from typing import Any

from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.quantization import qat
from gemma4_compat._gemma4.quantization.other_quantizers import DEQUANTIZE, is_packed
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F56",
    severity="crash",
    affected=">=0.18.0",
    acts_on="QAT checkpoints",
    requires="transformers>=5.11",
    needs="transformers-qat-loading",
)


@PATCH.replaces("peft.tuners.tuners_utils", "BaseTuner.merge_adapter")
def merge_adapter(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    _refuse(self.model)
    return original(self, *args, **kwargs)


@PATCH.replaces("peft.tuners.tuners_utils", "BaseTuner._unload_and_optionally_merge")
def unload_and_optionally_merge(original: Original, self: Any, merge: bool = True, *args: Any, **kwargs: Any) -> Any:
    if merge:
        _refuse(self.model)
    return original(self, merge, *args, **kwargs)


def _refuse(model: Any) -> None:
    bases = {name: one.get_base_layer() for name, one in model.named_modules() if hasattr(one, "get_base_layer")}
    layers = [name for name, base in bases.items() if qat.is_linear(base)]
    packed = [name for name, base in bases.items() if is_packed(base)]
    if packed:
        raise Gemma4CompatError(
            f"an adapter cannot be merged into {len(packed)} layers of a compressed-tensors checkpoint, {packed[0]!r} "
            "among them: they stay packed as integers of 4 or 8 bits. Nothing was changed. Keep the adapter loaded. "
            f"For a model to merge into, {DEQUANTIZE}."
        )
    if layers:
        raise Gemma4CompatError(
            f"an adapter cannot be merged into {len(layers)} layers of a QAT checkpoint (quant_method 'gemma'), "
            f"{layers[0]!r} among them: they store integers of 2 to 8 bits and round their activations. Nothing was "
            "changed. Keep the adapter loaded; or load the model without it, call model.dequantize(), load the "
            "adapter onto that and merge: the result is a bf16 model that rounds no activations."
        )


@PATCH.replaces("peft.utils.integrations", "dequantize_module_weight")
def dequantize_module_weight(original: Original, module: Any) -> Any:
    if qat.is_linear(module):
        return qat.values(module)
    return original(module)


def reproduce(workspace: Workspace) -> Outcome:
    from peft import LoraConfig, get_peft_model

    from gemma4_compat._lab import tiny

    model = tiny.load(workspace.qat(grouped=False), device=workspace.main)  # loads on every release
    settings = LoraConfig(r=4, target_modules=r".*language_model.*up_proj", init_lora_weights=False)
    adapted = get_peft_model(model, settings).eval()
    before = {name: value.clone() for name, value in adapted.state_dict().items()}
    try:
        adapted.merge_and_unload()
    except Gemma4CompatError as error:
        after = adapted.state_dict()
        changed = [name for name, value in before.items() if not value.equal(after[name])]
        return Outcome(bool(changed), f"refused: {error}")
    return Outcome(True, "merged")
