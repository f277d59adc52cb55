"""A linear layer whose weight stays the integers that a checkpoint packs: it is unpacked while the layer computes.

The format is ``pack-quantized`` of compressed-tensors with symmetric integers: an int32 holds eight values of 4 bits
or four of 8 bits, the first lowest, with zero in the middle of the range. A scale belongs to a group of columns, to a
row or to the whole weight.

Experts in 4 bits of bitsandbytes are multiplied as they are packed where a kernel does that: :func:`experts_forward`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import wrap_torch_function

from gemma4_compat._engine.io.text import size_text
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4 import host
from gemma4_compat._gemma4.quantization import expert_storage, opt_in
from gemma4_compat._gemma4.quantization.experts import NAMES
from gemma4_compat._gemma4.quantization.other_quantizers import DEQUANTIZE, is_compressed

_LOGGER = logging.getLogger("gemma4_compat")

_TENSORS = {"weight_packed", "weight_scale", "weight_shape", "bias"}
_STRATEGIES = ("group", "channel", "tensor")

Unpack = Callable[[Any, Any, int, int, Any], Any]


def is_wanted(model: Any, device_map: Any) -> bool:
    """Whether layers are to stay packed: a user asks for it, or the decompressed model could not be where it goes.

    Unpacking takes time in each forward, so a model that fits is left to compressed-tensors.

    Args:
        model: as for :func:`keep_packed`.
        device_map: as ``from_pretrained`` got it.
    """
    if opt_in.PACKED.is_enabled() or _offloads(device_map):
        return True
    needed, free = sum(weight.nbytes for weight in model.parameters()), _free(device_map)
    for module in model.modules():
        if _bits(module) is not None:
            needed += module.out_features * module.in_features * module.weight_scale.element_size()
            needed -= sum(getattr(module, name).nbytes for name in _TENSORS - {"bias"})
    if free is None or needed <= free:
        return False
    _LOGGER.warning(
        "the layers of this compressed-tensors checkpoint stay packed, which takes time in each forward: unpacked the "
        "model would take %s, and %s are free",
        size_text(needed),
        size_text(free),
    )
    return True


def remedy(model: Any) -> str:
    """What to do where layers that are to be decompressed are refused."""
    layers = [module for module in model.modules() if is_compressed(module)]
    if any(_bits(module) is None for module in layers):
        return DEQUANTIZE
    return f"load it inside gemma4_compat.quantize(packed=True), which keeps its layers packed, or {DEQUANTIZE}"


def _offloads(device_map: Any) -> bool:
    places = set(device_map.values()) if isinstance(device_map, Mapping) else set()
    return "disk" in places or ("cpu" in places and len(places) > 1)


def _free(device_map: Any) -> int | None:
    """Bytes that are free on the accelerators that a model goes to; None if that is not known."""
    if not torch.cuda.is_available():
        return None
    devices = {torch.device("cuda", index) for index in range(torch.cuda.device_count())}
    if isinstance(device_map, Mapping):
        places = device_map.values()
        found = (torch.device("cuda", one) if isinstance(one, int) else torch.device(one) for one in places)
        devices = {torch.device("cuda", one.index or 0) for one in found if one.type == "cuda"}
    elif device_map is None:  # it will be moved
        devices = {torch.device("cuda", torch.cuda.current_device())}
    return sum(host.free_memory(device) or 0 for device in devices) if devices else None


def keep_packed(model: Any, unpack: Unpack) -> None:
    """Turn the layers of compressed-tensors that this module understands into :class:`PackedLinear`, in place.

    The model is as compressed-tensors prepares it for the tensors of a checkpoint, on meta. If no other layer of the
    library remains, its hook goes, which decompresses a model in the first forward; otherwise it decompresses only
    these.

    Args:
        model: changed in place.
        unpack: computes what :func:`unpacked` does, with its bits.
    """
    for module in model.modules():
        bits = _bits(module)
        if bits is None:
            continue
        module.__class__ = PackedLinear
        module.bits, module.stored, module.unpack = bits, module.weight_scale.dtype, unpack
        for name in ("forward", "quantization_scheme", "quantization_status"):
            vars(module).pop(name, None)
        module._is_hf_initialized = True  # transformers would fill `weight` with random values, of which nothing stays
    if not any(is_compressed(module) for module in model.modules()):
        vars(model).pop("ct_decompress_hook").remove()


def _bits(module: Any) -> int | None:
    """The bits of a value of this layer, 4 or 8; None if it is no layer of this format, or rounds activations."""
    scheme = vars(module).get("quantization_scheme")
    if type(module) is not torch.nn.Linear or scheme is None or not _TENSORS.issuperset(module._parameters):
        return None
    weights, packed = scheme.weights, module._parameters.get("weight_packed")
    if weights is None or packed is None or scheme.input_activations or scheme.output_activations:
        return None
    bits: int = weights.num_bits
    width, groups = -(-module.in_features * bits // 32), module.weight_scale.shape[-1]
    understood = bits in (4, 8) and weights.type == "int" and weights.symmetric and weights.strategy in _STRATEGIES
    fits = packed.dtype is torch.int32 and packed.shape[-1] == width and module.in_features % groups == 0
    return bits if understood and fits else None


def unpacked(packed: Any, scale: Any, columns: int, bits: int, stored: Any) -> Any:
    """The weight, ``(rows, columns)``, in the dtype of the scales: the bits that compressed-tensors computes.

    Args:
        packed: int32, (rows, columns * bits / 32 rounded up).
        scale: floating point, (rows, groups), (rows, 1) or (1,).
        columns: of the weight.
        bits: of a value, 4 or 8.
        stored: the dtype in which the model was loaded. Cast since then, the weight has its values, as a plain one.
    """
    dtype, scale = scale.dtype, scale.to(stored)
    packed = packed.view(torch.uint8)
    if bits == 4:
        values = torch.stack((packed & 15, packed >> 4), -1).flatten(1).view(torch.int8).sub_(8)
    else:
        values = (packed ^ 128).view(torch.int8)
    values = values[:, :columns].to(scale.dtype)
    return values.unflatten(1, (scale.shape[-1], -1)).mul_(scale.unsqueeze(-1)).flatten(1).to(dtype)


@wrap_torch_function(lambda input, *_: (input,))  # type: ignore[untyped-decorator]
def product(input: Any, packed: Any, scale: Any, bias: Any) -> Any:
    """A product with a weight of 4 bits, if a ``TorchFunctionMode`` computes it from the integers; else None."""
    return None


class PackedLinear(torch.nn.Linear):  # type: ignore[misc]
    """An ``nn.Linear`` over ``weight_packed``, ``weight_scale`` and ``weight_shape``; :func:`keep_packed` makes it."""

    bits: int  # of a value
    stored: torch.dtype
    unpack: Unpack

    @property
    def weight(self) -> Any:
        """A new tensor with the values that the layer computes with, ``(out_features, in_features)``. To write into
        it changes nothing; to assign its ``data``, as a merge does, raises ``Gemma4CompatError``.
        """
        # Inside `module_hooks.seen_on_execution_device` there are no values, and only dtype and device are read.
        values = self._values() if self.weight_packed.numel() else self.weight_scale.detach()
        return values.as_subclass(_Values)

    def forward(self, input: Any) -> Any:
        if torch.is_grad_enabled() and input.requires_grad:
            settings = self.bits, self.stored, self.unpack
            return _Product.apply(input, self.weight_packed, self.weight_scale, self.bias, *settings)
        found = None
        if self.bits == 4 and self.weight_scale.dtype == self.stored:
            found = product(input, self.weight_packed, self.weight_scale, self.bias)
        return torch.nn.functional.linear(input, self._values(), self.bias) if found is None else found

    def _values(self) -> Any:
        with torch.no_grad():
            return self.unpack(self.weight_packed, self.weight_scale, self.in_features, self.bits, self.stored)


class _Values(torch.Tensor):  # type: ignore[misc]
    """The weight of a :class:`PackedLinear`, which nothing can be assigned to. What is computed with it is plain."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def data(self) -> Any:
        return super().data

    @data.setter
    def data(self, value: Any) -> None:
        raise Gemma4CompatError(
            "the weight of this layer stays packed as the integers of its compressed-tensors checkpoint: it cannot be "
            f"replaced, nor merged into. Nothing was changed. For a weight that can be, {DEQUANTIZE}."
        )


class _Product(torch.autograd.Function):  # type: ignore[misc]
    """``linear``, whose backward pass unpacks the weight again instead of keeping it."""

    @staticmethod
    def forward(input: Any, packed: Any, scale: Any, bias: Any, bits: int, stored: Any, unpack: Unpack) -> Any:
        return torch.nn.functional.linear(input, unpack(packed, scale, input.shape[-1], bits, stored), bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        input, packed, scale, _, *settings = inputs
        *numbers, ctx.unpack = settings
        ctx.settings = input.shape[-1], *numbers
        ctx.save_for_backward(packed, scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        packed, scale = ctx.saved_tensors
        weight = ctx.unpack(packed, scale, *ctx.settings).to(gradient.dtype)  # another under autocast
        bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None
        return gradient @ weight, None, None, bias, None, None, None


@wrap_torch_function(lambda given, *_: (given,))  # type: ignore[untyped-decorator]
def multiplies_experts(given: Any, chosen: Any, parameters: Any) -> bool:
    """Whether a ``TorchFunctionMode`` computes :func:`expert_product` for all of these parameters.

    Args:
        given: ``[tokens, hidden size]``.
        chosen: int64, ``[products]``: the experts, equally many for each token.
        parameters: the 4-bit weights of all experts, in memory that the device can read.
    """
    return False


@wrap_torch_function(lambda given, *_: (given,))  # type: ignore[untyped-decorator]
def expert_product(given: Any, chosen: Any, parameter: Any) -> Any:
    """The products of rows, ``[rows, inputs]``, with an expert's weights each: ``[products, rows of a weight]``."""
    each = given.repeat_interleave(len(chosen) // len(given), dim=0)
    return torch.bmm(expert_storage.dequantized(parameter, chosen), each.unsqueeze(2)).squeeze(2)


def experts_forward(
    module: Any, weights: Mapping[str, Any], hidden_states: Any, chosen: Any, top_k_weights: Any
) -> Any:
    """What an experts module returns, ``[tokens, hidden size]``.

    Args:
        module: the experts.
        weights: their 4-bit parameters by name, in memory of the device.
        hidden_states: ``[tokens, hidden size]``.
        chosen: int64, ``[tokens * k]``: where the experts of each token are in the weights.
        top_k_weights: ``[tokens, k]``.
    """
    up, down = (weights[name] for name in NAMES)
    gate, value = expert_product(hidden_states, chosen, up).chunk(2, dim=-1)
    found = expert_product(module.act_fn(gate) * value, chosen, down)
    weighted = (found * top_k_weights.reshape(-1, 1)).float().unflatten(0, top_k_weights.shape)
    # One after the other: the order of PyTorch's sums depends on how many tokens there are.
    return functools.reduce(torch.add, weighted.unbind(1)).to(hidden_states.dtype)
