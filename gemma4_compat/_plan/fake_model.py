"""The model of a training step, without memory: its weights are fake, and what a step changes is put back."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Collection, Iterator
from typing import Any

from gemma4_compat._gemma4.quantization import expert_forward
from gemma4_compat._gemma4.quantization.experts import NAMES


@contextlib.contextmanager
def put_back(model: Any) -> Iterator[None]:
    """Inside, a step may change modules of ``model``; afterwards they have the attributes, hooks and parts they had.

    Weights are not written, and lose their gradients.
    """
    before = [(module, {name: _copy(value) for name, value in vars(module).items()}) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)
        model.zero_grad(set_to_none=True)


def _copy(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, (dict, list, set)) else value


def replace_weights(adapted: Any, quantized: Collection[str]) -> list[int]:
    """Replace every tensor of the model by a fake one, 4-bit if ``quantized`` says so. Returns the trained sizes."""
    import torch

    base = adapted.get_base_model()
    tied: dict[int, Any] = {}
    sizes = []
    for module in adapted.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in tied:
                dtype = torch.float32 if parameter.requires_grad else parameter.dtype
                data = torch.empty(parameter.shape, dtype=dtype)
                tied[id(parameter)] = torch.nn.Parameter(data, requires_grad=parameter.requires_grad)
                sizes += [data.numel()] if parameter.requires_grad else []
            module._parameters[name] = tied[id(parameter)]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    base.tie_weights()
    for name in quantized:
        module = base.get_submodule(name)
        base_layer = getattr(module, "base_layer", module)
        _to_4bit(base_layer)
        if module is not base_layer:
            # PEFT's class for 4-bit layers leaves its inputs to autocast (peft/tuners/lora/bnb.py). The class for
            # other layers, which this is, first casts them to the adapter's float32.
            module.cast_input_dtype_enabled = False
    return sizes


def _to_4bit(linear: Any) -> None:
    """Make a linear layer compute like bitsandbytes' on CUDA with more than one token.

    Its weight is dequantized into a temporary, in the forward pass and again in the backward pass; autograd keeps the
    packed weight and no input (``MatMul4Bit``).
    """
    import torch

    class Dequantized(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, inputs: Any, shape: Any) -> Any:
            ctx.shape = shape
            return inputs @ torch.empty(shape, dtype=inputs.dtype).t()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient @ torch.empty(ctx.shape, dtype=gradient.dtype), None

    shape = tuple(linear.weight.shape)
    linear.weight = torch.nn.Parameter(torch.empty(-(-linear.weight.numel() // 2), dtype=torch.uint8), False)
    dtype = torch.bfloat16

    def forward(inputs: Any) -> Any:
        return Dequantized.apply(inputs.to(dtype), shape)

    linear.forward = forward


def experts_to_4bit(module: Any) -> None:
    """Make experts compute as with ``quantize(experts=True)``: from weights that are made in each pass."""
    import torch

    make: dict[str, Any] = {}
    for name in NAMES:
        weight = module._parameters[name]
        make[name] = functools.partial(torch.empty, weight.shape, dtype=torch.bfloat16)
        packed = torch.empty(-(-weight.numel() // 2), dtype=torch.uint8)
        module._parameters[name] = torch.nn.Parameter(packed, requires_grad=False)
    upstream = type(module).forward

    def forward(*args: Any) -> Any:
        return expert_forward.with_values(lambda made: upstream(made, *args), module, module.num_experts, make, {})

    module.forward = forward
