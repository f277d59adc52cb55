"""PEFT's adapter layers for bitsandbytes, and the plain ones that take their place over an ``nn.Linear``."""

from __future__ import annotations

import sys
import types
from typing import Any

_QUANTIZED = ("Params4bit", "Int8Params")
#: What the plain layers have and those for bitsandbytes may not: the values for a base that is an ``nn.Linear``.
_PLAIN_ATTRIBUTES = {"fan_in_fan_out": False, "is_target_conv_1d_layer": False}


def is_quantized(module: Any) -> bool:
    """Whether this layer's own weight is one that bitsandbytes packed."""
    return type(vars(module).get("_parameters", {}).get("weight")).__name__ in _QUANTIZED


def plain_class(layer: Any) -> Any:
    """The class PEFT uses in place of this adapter layer's where the base is an ``nn.Linear``; None for a layer that
    is no variant for bitsandbytes.
    """
    kind = type(layer)
    package, _, module = kind.__module__.rpartition(".")
    if not package.startswith("peft.tuners.") or module != "bnb":
        return None
    name = "SVDLinear" if kind.__name__.startswith("SVD") else "Linear"
    return vars(sys.modules[f"{package}.layer"])[name]


def make_plain(layer: Any) -> None:
    """Turn an adapter layer whose base layer was quantized, and is an ``nn.Linear`` now, into the plain one."""
    attributes = vars(layer)
    if "quantization_backend" in attributes:  # a tuner with one class for all kinds of base layers
        attributes["quantization_backend"] = None
    before, after = type(layer), plain_class(layer)
    if after is None:
        return
    layer.__class__ = after
    for name, value in _PLAIN_ATTRIBUTES.items():
        attributes.setdefault(name, value)
    # A hook of accelerate around this layer holds the forward that the class had.
    for name, value in list(attributes.items()):
        if isinstance(value, types.MethodType) and value.__self__ is layer:
            method = value.__func__.__name__
            if value.__func__ is getattr(before, method, None):
                attributes[name] = types.MethodType(getattr(after, method), layer)
