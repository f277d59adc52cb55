"""Quantized parameters keep ``_is_hf_initialized`` when accelerate moves them, so offloading does not crash.

Symptom: ``TypeError: Params4bit.__new__() got an unexpected keyword argument '_is_hf_initialized'`` (``Int8Params``
too) when accelerate attaches its hooks to a quantized model. Any CPU or disk offload of such a model ends there.
With bitsandbytes 0.50 and later nothing is raised, but the attribute is lost.

Cause: transformers 5 marks every loaded parameter with ``_is_hf_initialized``. ``set_module_tensor_to_device`` moves
a bitsandbytes parameter by building a new one from the ``__dict__`` of the old one, including this attribute.
bitsandbytes before 0.50 accepts no unknown keyword. Later releases accept and discard it.

Fix: The attribute is removed for the move and restored afterwards, on the new parameter and on the old one, which
other code may still hold.

Remove when: the oldest supported accelerate is 1.14.0.
"""

from typing import Any

from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F1",
    severity="crash",
    affected=">=1.12,<1.14.0",
    acts_on="every model",
    requires="bitsandbytes transformers>=5",
    bug="https://github.com/huggingface/transformers/issues/43872",
    applied_upstream="pull/3976",
)

MARK = "_is_hf_initialized"
_CLASSES = frozenset({"Params4bit", "Int8Params", "FP4Params"})  # the names upstream itself tests for


@PATCH.replaces("accelerate.utils.modeling", "set_module_tensor_to_device")
def set_module_tensor_to_device(original: Original, module: Any, tensor_name: str, *args: Any, **kwargs: Any) -> None:
    path, _, name = tensor_name.rpartition(".")
    owner = module.get_submodule(path) if path else module
    old = owner._parameters.get(name)
    if type(old).__name__ not in _CLASSES or MARK not in vars(old):
        original(module, tensor_name, *args, **kwargs)
        return
    mark = vars(old).pop(MARK)
    try:
        original(module, tensor_name, *args, **kwargs)
    finally:
        setattr(old, MARK, mark)
    setattr(owner._parameters[name], MARK, mark)


def reproduce(workspace: Workspace) -> Outcome:
    from accelerate.utils import set_module_tensor_to_device

    for quantization in ("4bit", "8bit"):
        model = workspace.load(quantization)
        layer = model.model.language_model.layers[0].mlp.up_proj
        set_module_tensor_to_device(layer, "weight", "meta")
        if not getattr(layer.weight, MARK, False):
            return Outcome(True, f"{MARK} is lost on the moved {quantization} parameter")
    workspace.split("4bit")
    return Outcome(False, f"4-bit and 8-bit parameters move, {MARK} kept; the model dispatches")
