"""PEFT's adapter layers for bitsandbytes, and the plain ones that replace them over an ``nn.Linear``."""

from __future__ import annotations

import copy
import sys
import types
from typing import Any

_QUANTIZED = ("Params4bit", "Int8Params")
#: Attributes that plain layers have and those for bitsandbytes may lack -> their values over an ``nn.Linear``.
_PLAIN_ATTRIBUTES = {"fan_in_fan_out": False, "is_target_conv_1d_layer": False}


def is_quantized(module: Any) -> bool:
    """Whether bitsandbytes packed this layer's own weight."""
    return type(vars(module).get("_parameters", {}).get("weight")).__name__ in _QUANTIZED


def plain_class(layer: Any) -> Any:
    """The class PEFT uses instead of this adapter layer's if the base is an ``nn.Linear``; None if the layer is not a
    variant for bitsandbytes.
    """
    kind = type(layer)
    package, _, module = kind.__module__.rpartition(".")
    if not package.startswith("peft.tuners.") or module != "bnb":
        return None
    name = "SVDLinear" if kind.__name__.startswith("SVD") else "Linear"
    return vars(sys.modules[f"{package}.layer"])[name]


def make_plain(layer: Any) -> None:
    """Turn an adapter layer into the plain one, after its quantized base was replaced by an ``nn.Linear``."""
    attributes = vars(layer)
    if "quantization_backend" in attributes:  # a tuner with one class for all kinds of base layers
        attributes["quantization_backend"] = None
    before, after = type(layer), plain_class(layer)
    if after is None:
        return
    layer.__class__ = after
    for name, value in _PLAIN_ATTRIBUTES.items():
        attributes.setdefault(name, value)
    # An accelerate hook around this layer holds the forward of the old class.
    for name, value in list(attributes.items()):
        if isinstance(value, types.MethodType) and value.__self__ is layer:
            method = value.__func__.__name__
            if value.__func__ is getattr(before, method, None):
                attributes[name] = types.MethodType(getattr(after, method), layer)


def scales(base: Any) -> Any:
    """The current scales of an 8-bit layer's weight (a merge discards them); None for a 4-bit layer."""
    state = getattr(base, "state", None)
    if state is None:
        return None
    return state.SCB if state.SCB is not None else base.weight.SCB


def dequantized(weight: Any, scales: Any) -> Any:
    """A bitsandbytes weight in float32, ``[out, in]``; ``scales`` are those of :func:`scales`."""
    if getattr(weight, "has_fp16_weights", False) and weight.is_floating_point():
        return weight.detach().float()
    from peft.utils.integrations import dequantize_bnb_weight

    state = weight.quant_state if scales is None else types.SimpleNamespace(SCB=scales)
    return dequantize_bnb_weight(weight, state=state).detach().float()


def over_plain_weight(layer: Any, weight: Any = None) -> Any:
    """A plain layer with the adapters of a quantized one, over the same weight (or ``weight``) in float32."""
    import torch

    quantized = layer.get_base_layer()
    if weight is None:
        weight = dequantized(quantized.weight, scales(quantized))
    base = torch.nn.Linear(quantized.in_features, quantized.out_features, bias=False, device="meta")
    base.weight = torch.nn.Parameter(weight, requires_grad=False)
    if quantized.bias is not None:
        base.bias = torch.nn.Parameter(quantized.bias.detach().float(), requires_grad=False)
    plain = with_base(layer, base)
    make_plain(plain)
    return plain


def shallow_copy(base: Any) -> Any:
    """A quantized layer over the same packed weight, without hooks. A forward changes only the copy."""
    import torch

    copied, weight = copy.copy(base), base.weight
    attributes = vars(copied)
    for name in ("forward", "_old_forward", "_hf_hook"):  # accelerate's call those of the original
        attributes.pop(name, None)
    for name, value in attributes.items():
        if isinstance(value, (dict, list)):
            attributes[name] = value.copy()
    own = torch.Tensor._make_subclass(type(weight), weight.data, weight.requires_grad)
    vars(own).update(vars(weight))
    copied._parameters["weight"] = own
    for holder, name in ((own, "quant_state"), (copied, "quant_state"), (copied, "state")):  # 4-bit, and 8-bit
        if name in vars(holder):
            setattr(holder, name, copy.copy(vars(holder)[name]))
    return copied


def with_base(layer: Any, base: Any) -> Any:
    """Another layer with the same adapters over ``base``. Merging it does not change ``layer``."""
    copied = copy.copy(layer)
    attributes = vars(copied)
    attributes.pop("merge", None)
    for name, value in attributes.items():
        if isinstance(value, (dict, list)):
            attributes[name] = value.copy()
    attributes["_modules"]["base_layer"] = base
    return copied
