"""Offloaded modules can be quantized, bit for bit as on the accelerator; each load reports which ones are.

Symptom: silent: a 4-bit (or 8-bit) model with offloaded modules is bigger than requested, and its logits differ from
those of the same model on one device. What a ``device_map`` puts on the CPU or on disk stays in bf16, so it takes
four times the memory and the time to move. ``device_map="auto"`` does quantize it, but on the CPU, whose kernels do
not agree with those of the GPU on every scale, and what it puts on disk is read back unquantized.

Cause: ``_process_model_before_weight_loading`` of the bitsandbytes quantizers adds what the map offloads to the list
of modules to skip. Upstream documents this, and it is the reason for ``llm_int8_enable_fp32_cpu_offload``: when that
flag was introduced, a quantized weight could not be offloaded.

Fix: The default stays, including the side effects of upstream's rule (a skip list): a catch-all ``""`` on the CPU
keeps everything unquantized, and before 5.21 ``...layers.1`` on the CPU also keeps layers 10 to 19 unquantized. Inside
``gemma4_compat.quantize(offloaded=True)``, or with ``GEMMA4_COMPAT_ENABLE=transformers-quantize-offloaded``, modules
of Gemma 4 models are quantized wherever the map puts them, except skipped ones (``llm_int8_skip_modules``,
``lm_head``). The flag is not needed then.

Offloaded weights are always quantized on the accelerator, one weight at a time, so that they have the bits they would
have there. Weights on disk are written quantized; a load without a folder for them is refused. Every load of a
quantized Gemma 4 model with offloaded modules logs one line that says which of them are quantized.

The patch is always applied, like any other, and quantizes what upstream skips only on request. A patch that waited for
its name in the environment could not serve a context manager, or a single thread.

Remove when: transformers can quantize what it offloads.
"""

from collections.abc import Callable
from typing import Any

from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.accelerate import attached
from gemma4_compat._gemma4.models import family
from gemma4_compat._gemma4.quantization import offloaded, opt_in
from gemma4_compat.patches.api import Original, Outcome, Patch, Workspace

PATCH = Patch(
    "F32",
    severity="wrong_result",
    affected=">=5.5",
    requires="accelerate bitsandbytes",
    needs="bitsandbytes-meta-quant-state bitsandbytes-int8-meta-scales accelerate-int8-offload",
)

# Attributes of a quantizer, which belongs to a single load. The first is unknown before it sees the model.
_GEMMA4, _REFUSED, _PLACEMENT = attached.IS_GEMMA4, attached.REFUSED, attached.PLACEMENT
_TO_WRITE = attached.TO_WRITE  # of a weight
_BITSANDBYTES = ("Bnb4BitHfQuantizer", "Bnb8BitHfQuantizer")


@PATCH.replaces("transformers.quantizers.quantizer_bnb_4bit", "Bnb4BitHfQuantizer.validate_environment")
@PATCH.replaces("transformers.quantizers.quantizer_bnb_8bit", "Bnb8BitHfQuantizer.validate_environment")
def validate_environment(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    # Upstream refuses maps with offloaded modules unless the flag allows them to stay unquantized.
    gemma4 = vars(self).get(_GEMMA4)
    if gemma4 is False or not opt_in.OFFLOADED.is_enabled() or not isinstance(kwargs.get("device_map"), dict):
        original(self, *args, **kwargs)
        return
    original(self, *args, **{**kwargs, "device_map": None})
    if gemma4 is None:
        vars(self)[_REFUSED] = (args, kwargs)


@PATCH.replaces(
    "transformers.quantizers.quantizer_bnb_4bit", "Bnb4BitHfQuantizer._process_model_before_weight_loading"
)
@PATCH.replaces(
    "transformers.quantizers.quantizer_bnb_8bit", "Bnb8BitHfQuantizer._process_model_before_weight_loading"
)
def process_model_before_weight_loading(original: Original, self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    gemma4 = vars(self)[_GEMMA4] = family.has_parts(model)
    again = vars(self).pop(_REFUSED, None)
    if not gemma4:
        if again is not None:
            self.validate_environment(*again[0], **again[1])
        return original(self, model, *args, **kwargs)
    if not opt_in.OFFLOADED.is_enabled():
        return original(self, model, *args, **kwargs)
    if args:
        return original(self, model, None, *args[1:], **kwargs)
    return original(self, model, **{**kwargs, "device_map": None})  # upstream skips what the map puts on cpu or disk


@PATCH.replaces("transformers.integrations.accelerate", "_get_device_map")
def get_device_map(
    original: Original,
    model: Any,
    device_map: Any,
    max_memory: Any = None,
    hf_quantizer: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    placement = original(model, device_map, max_memory, hf_quantizer, *args, **kwargs)
    if (
        type(hf_quantizer).__name__ in _BITSANDBYTES
        and isinstance(placement, dict)
        and family.has_parts(model)
        and any(device in offloaded.OFFLOADED for device in placement.values())
    ):
        vars(hf_quantizer)[_PLACEMENT] = placement
    return placement


# Imported by the first load that quantizes, after it has checked the map.
@PATCH.replaces("transformers.integrations.bitsandbytes", "Bnb4bitQuantize.convert", optional=True)
@PATCH.replaces("transformers.integrations.bitsandbytes", "Bnb8bitQuantize.convert", optional=True)
def quantize(
    original: Callable[..., dict[str, Any]], self: Any, input_dict: dict[str, Any], *args: Any, **kwargs: Any
) -> dict[str, Any]:
    placement = vars(self.hf_quantizer).get(_PLACEMENT)
    devices = {} if placement is None else {name: offloaded.device_of(name, placement) for name in input_dict}
    if placement is None or not any(devices.values()):
        return original(self, input_dict, *args, **kwargs)
    main = offloaded.main_accelerator(placement)
    if main is not None:
        input_dict = {name: _moved(value, main) if devices[name] else value for name, value in input_dict.items()}
    result = original(self, input_dict, *args, **kwargs)
    del input_dict
    for name in result:
        if devices.get(name) and result[name].device.type != "cpu":
            owner = vars(result[name]).get("module")  # a 4-bit weight knows its module, but a moved one does not
            result[name] = result[name].to("cpu")
            if owner is not None:
                result[name].module = owner
        if devices.get(name) == "disk":
            _leave_on_meta(kwargs["model"], name, result[name])
    return result


# Imported by the first load that quantizes, after it has checked the map.
@PATCH.replaces("transformers.integrations.bitsandbytes", "Bnb4bitDeserialize.convert", optional=True)
@PATCH.replaces("transformers.integrations.bitsandbytes", "Bnb8bitDeserialize.convert", optional=True)
def deserialize(
    original: Callable[..., dict[str, Any]], self: Any, input_dict: dict[str, Any], *args: Any, **kwargs: Any
) -> dict[str, Any]:
    result = original(self, input_dict, *args, **kwargs)
    placement, name = vars(self.hf_quantizer).get(_PLACEMENT), kwargs.get("full_layer_name")
    weight = result.get("weight", next(iter(result.values()), None))  # or a parameter with another name
    if placement and name and hasattr(weight, "to") and offloaded.device_of(name, placement) == "disk":
        _leave_on_meta(kwargs["model"], name, weight)
    return result


def _moved(value: Any, device: Any) -> Any:
    return [item.to(device) for item in value] if isinstance(value, list) else value.to(device)


def _leave_on_meta(model: Any, name: str, weight: Any) -> None:
    """Leave the module with what accelerate leaves for a weight on disk: the weight on meta, with its scales.

    transformers only writes the weight; the scales are on the host (bitsandbytes-meta-quant-state,
    bitsandbytes-int8-meta-scales).
    """
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    setattr(weight, _TO_WRITE, True)
    module._parameters[last] = weight.to("meta")
    module._parameters[last]._is_hf_initialized = True  # otherwise transformers would draw random numbers for it
    if "quant_state" in vars(module):
        module.quant_state = module._parameters[last].quant_state


@PATCH.replaces("transformers.core_model_loading", "offload_and_maybe_resave_param")
def offload_and_maybe_resave_param(
    original: Original,
    target_name: str,
    param: Any,
    loading_info: Any,
    disk_offload_folder: Any,
    disk_offload_index: dict[str, Any],
    applied_ops: Any,
) -> Any:
    if hasattr(param, _TO_WRITE):
        if disk_offload_folder is None:
            raise Gemma4CompatError(
                f"device_map puts {target_name.rpartition('.')[0]!r} on disk, and it is quantized, so it has to be "
                "written there. Give from_pretrained a folder for it (offload_folder='offload'), or put it on 'cpu'."
            )
        disk_offload_index.pop(target_name, None)  # of the unquantized weight in the checkpoint
        param = param.data
    return original(target_name, param, loading_info, disk_offload_folder, disk_offload_index, applied_ops)


@PATCH.replaces("transformers.integrations.accelerate", "accelerate_dispatch")
def accelerate_dispatch(
    original: Original, model: Any, hf_quantizer: Any, device_map: Any, *args: Any, **kwargs: Any
) -> Any:
    if hf_quantizer is not None and (placement := vars(hf_quantizer).pop(_PLACEMENT, None)) is not None:
        offloaded.report(model, placement, hf_quantizer.quantization_config.llm_int8_skip_modules or ())
    return original(model, hf_quantizer, device_map, *args, **kwargs)


def reproduce(workspace: Workspace) -> Outcome:
    from gemma4_compat._lab import tiny

    found = []
    for quantization in ("4bit-double", "8bit"):
        whole = workspace.load(quantization)
        placement = workspace.device_map(whole, "layers")
        with opt_in.OFFLOADED.enabled():
            folder = workspace.new_folder()
            model = tiny.load(workspace.checkpoint, quantization, device_map=placement, offload_folder=folder)
        found.append(workspace.difference(workspace.reference(quantization), model))
    return Outcome.of_parity(max(found), "4-bit and 8-bit decoder layers offloaded by a device map")
