"""Offloading weights of torchao, quanto or compressed-tensors that cannot be offloaded is refused early.

Symptom: ``NotImplementedError: Int8Tensor dispatch: attempting to run unimplemented operator/function`` (torchao, a
map with ``"disk"``), or ``TypeError: WeightQBytesTensor.__new__() missing 6 required positional arguments`` (quanto,
any map that offloads), from ``dispatch_model``, with part of the model already moved. With compressed-tensors, in the
first forward, ``AttributeError: ... object has no attribute '_hf_hook'`` or an ``AssertionError`` without a message.

Cause: The weights are tensor subclasses around several tensors. ``offload_weight`` writes the bytes of one tensor, and
``set_module_tensor_to_device`` builds a parameter by calling the class of the old one. compressed-tensors decompresses
all layers in the first forward, and for that replaces accelerate's offloading by its own.

Fix: On Gemma 4 models such a map is refused before anything is changed. The error names the module, what it holds, and
what to do instead. torchao's weights are offloaded to host memory as before, with the same outputs. Layers of
compressed-tensors that stay packed (``transformers-packed-layers``) are offloaded as any others.

Remove when: accelerate offloads tensor subclasses.
"""

from importlib.util import find_spec
from typing import Any

from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.models import family
from gemma4_compat._gemma4.quantization import other_quantizers
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch("F66", kind="refusal", severity="crash", affected=">=1.12", requires="transformers>=5.5")

#: Module of the classes -> the library, and the places to which their weights cannot be offloaded.
_LIBRARIES = {"torchao": ("torchao", ("disk",)), "optimum": ("quanto", ("disk", "cpu"))}


@PATCH.replaces("accelerate.big_modeling", "dispatch_model")
def dispatch_model(original: Original, model: Any, device_map: Any, *args: Any, **kwargs: Any) -> Any:
    if family.has_parts(model):
        main = kwargs.get("main_device", args[0] if args else None)
        _refuse(model, device_map, main)
    return original(model, device_map, *args, **kwargs)


def _refuse(model: Any, device_map: Any, main: Any) -> None:
    devices = {str(device) for device in device_map.values()}
    if main is None:  # accelerate's rule
        main = next((device for device in device_map.values() if device not in ("cpu", "disk")), "cpu")
    offloaded = devices & ({"disk"} if main in ("cpu", "mps") else {"cpu", "disk"})
    if not offloaded:
        return
    for entry, device in device_map.items():
        # A module stays on a device given as an object, even torch.device("cpu").
        if not isinstance(device, str) or device not in offloaded:
            continue
        _refuse_compressed(model, entry, device)
        for name, parameter in model.named_parameters():
            if entry and name != entry and not name.startswith(f"{entry}."):
                continue
            library, places = _LIBRARIES.get(type(parameter).__module__.partition(".")[0], ("", ()))
            if device in places:
                others = "put it into host memory ('cpu'), " if "cpu" not in places else ""
                raise Gemma4CompatError(
                    f"device_map puts {entry!r} on {device!r}; {name!r} is a {type(parameter).__name__} of {library}, "
                    f"which accelerate cannot offload there. Nothing was changed. Keep it on a device, {others}or "
                    "quantize with BitsAndBytesConfig, whose weights can be offloaded anywhere"
                )


def _refuse_compressed(model: Any, entry: str, device: str) -> None:
    """compressed-tensors replaces the offloading of the whole model, also where the map offloads other modules."""
    from gemma4_compat._gemma4.quantization import packed_linear

    for name, module in model.named_modules():
        if other_quantizers.is_compressed(module):
            raise Gemma4CompatError(
                f"device_map puts {entry!r} on {device!r}; {name!r} is a layer of compressed-tensors that is "
                "decompressed in the first forward, and a model with such a layer cannot be offloaded. Nothing was "
                f"changed. Keep the model on devices, or {packed_linear.remedy(model)}"
            )


def settings() -> dict[str, Any]:
    """A quantization config of each of these libraries that is installed, as ``from_pretrained`` takes it."""
    import transformers

    found: dict[str, Any] = {}
    if find_spec("torchao") is not None:
        from torchao.quantization import Int8WeightOnlyConfig

        found["torchao"] = transformers.TorchAoConfig(Int8WeightOnlyConfig(), modules_to_not_convert=["lm_head"])
    if find_spec("optimum") is not None and find_spec("optimum.quanto") is not None:
        found["quanto"] = transformers.QuantoConfig(weights="int8", modules_to_not_convert=["lm_head"])
    return found


def reproduce(workspace: Workspace) -> Outcome:
    import torch
    import transformers

    from gemma4_compat._lab import tiny, tiny_models

    cls = getattr(transformers, tiny_models.class_name(workspace.checkpoint))
    refused = []
    for library, quantization in settings().items():
        model = cls.from_pretrained(workspace.checkpoint, dtype=torch.bfloat16, quantization_config=quantization)
        placement = tiny.device_map(model, "layers", main=workspace.main, offloaded="disk")
        try:
            workspace.dispatch_map(model, placement)
        except Gemma4CompatError as error:
            refused.append(f"{library}: {error}")
    if not refused:
        return Outcome(False, "neither torchao nor quanto is installed", applicable=False)
    return Outcome(False, "; ".join(refused))
