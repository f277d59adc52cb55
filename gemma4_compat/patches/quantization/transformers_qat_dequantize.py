"""``dequantize()`` works on a model loaded from Google's QAT checkpoints.

Symptom: ``NotImplementedError: gemma has no implementation of `dequantize` `` (the method's name differs between
releases) from ``model.dequantize()``, so there is no way to a model that an adapter can be merged into.

Cause: ``GemmaQuantizer`` has no ``_dequantize``.

Fix: Each layer is replaced by the plain one of an unquantized Gemma 4, with the values that it computes with, in the
dtype in which the model was loaded. The rounding of activations, which is not a property of a weight, is gone: apart
from one factor, the model computes as if its activation scales were zero. That factor is the embedding's scale, the
root of ``hidden_size``. Gemma 4 rounds it to the model's dtype, these checkpoints do not; if the root is not exact in
bfloat16 (E2B, E4B), embedded tokens differ by up to 2**-7 of their value. The model can be saved and quantized by
other means, and adapters are merged into it exactly as into any checkpoint. A model with offloaded layers is refused
before anything is replaced.

Remove when: ``GemmaQuantizer`` implements ``_dequantize``.
"""

from typing import Any

from gemma4_compat._errors import Gemma4CompatError, OffloadedWeightsError
from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat._gemma4.quantization import qat
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F56", severity="crash", affected=">=5.11", acts_on="QAT checkpoints")


@PATCH.replaces("transformers.quantizers.base", "HfQuantizer._dequantize")
def dequantize(original: Original, self: Any, model: Any, dtype: Any = None, **kwargs: Any) -> Any:
    if type(self).__name__ != "GemmaQuantizer":
        return original(self, model, *([] if dtype is None else [dtype]), **kwargs)
    _refuse(model)
    return qat.dequantized(model, dtype or model.config.dtype)


def _refuse(model: Any) -> None:
    layers = qat.packed(model)
    away = [name for name, module in layers.items() if module_hooks.offload_hook(module) is not None]
    if away:
        raise OffloadedWeightsError(
            f"dequantize: the weights of {len(away)} quantized layers are offloaded, {away[0]!r} among them, and "
            "would be several times as large in host memory or on disk. Nothing was changed. Load the model with "
            "everything on one device, device_map={'': 'cpu'}, and dequantize it there."
        )
    hooked = [name for name, module in layers.items() if hasattr(module, "_hf_hook")]
    if hooked:
        from accelerate.hooks import remove_hook_from_submodules

        devices = {str(module_hooks.hook_device(layers[name])) for name in hooked}
        if len(devices) > 1:
            raise Gemma4CompatError(
                f"dequantize: the model is split over {', '.join(sorted(devices))}. Nothing was changed. Load "
                "it with everything on one device, device_map={'': 'cpu'}, and dequantize it there."
            )
        remove_hook_from_submodules(model)


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._lab import tiny

    # These load on every release and do not round activations, which dequantizing would drop.
    model = tiny.load(workspace.qat(grouped=False, calibrated=False), device=workspace.main)
    expected = workspace.outputs(model)
    model.dequantize()
    return Outcome.of_parity(workspace.difference(expected, model), "a dequantized QAT model")
