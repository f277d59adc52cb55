"""A stand-in for the arithmetic of this package's kernels: PyTorch's, for each token as if it were the only one.

The kernels themselves run on a CPU in an emulator, which is too slow for texts of many tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gemma4_compat._gemma4.quantization import expert_storage, packed_linear
from gemma4_compat._kernels.specs import expert_products

#: Functions whose bits depend on the number of rows: on a CPU, powers of the last few numbers are computed in another
#: way than those of eight.
_ALONE = (torch.nn.functional.linear, torch.Tensor.mean, torch.pow, torch.Tensor.pow)


class ByRows(TorchFunctionMode):  # type: ignore[misc]
    """As :class:`custom.CustomKernels`."""

    def __init__(self, _device: Any, tokens: int = 1, _head: Any = None) -> None:
        super().__init__()
        self._tokens = tokens

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            return attention(*args, **kwargs)
        alone = func in _ALONE or "gemm_4bit" in getattr(func, "__name__", "")
        if self._tokens > 1 and alone and args[0].ndim >= 3 and args[0].shape[1] == self._tokens:
            rows = [row.clone(memory_format=torch.contiguous_format) for row in args[0].split(1, dim=1)]
            return torch.cat([func(row, *args[1:], **kwargs) for row in rows], dim=1)
        return func(*args, **kwargs)


class ByWidth(ByRows):
    """As :class:`ByRows`, with fewer operations: results in float64, once rounded, do not depend on how many rows
    there are.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is packed_linear.multiplies_experts:
            return multiplies(*args)
        if func is packed_linear.expert_product:
            return product(*args)
        if func not in _ALONE or args[0].dtype is torch.float64:
            return super().__torch_function__(func, types, args, kwargs)
        wide = [one.double() if isinstance(one, torch.Tensor) else one for one in args]
        return func(*wide, **kwargs or {}).to(args[0].dtype)


def multiplies(given: Any, chosen: Any, parameters: Any) -> bool:
    """Whether the kernel would suit, without a try of it."""
    for parameter in parameters:
        what, width = expert_products.arguments(parameter), parameter.quant_state.shape[-1]
        tried = given if width == given.shape[1] else given.new_empty(len(chosen), width)
        if parameter.quant_state.dtype != given.dtype or expert_products.kernel_of(tried, chosen, *what) is None:
            return False
    return True


def product(given: Any, chosen: Any, parameter: Any) -> Any:
    """As :func:`packed_linear.expert_product`, in float64, once rounded."""
    each = given.double().repeat_interleave(len(chosen) // len(given), dim=0)
    values = expert_storage.dequantized(parameter, chosen).double()
    return (values @ each.unsqueeze(2)).squeeze(2).to(given.dtype)


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any,
    *,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float,
    enable_gqa: bool = False,
) -> Any:
    """Sums in float64: rounded to 32 bits, and then to 16, they do not depend on where keys are."""
    assert not dropout_p
    assert not is_causal
    grouped = query.unflatten(1, (key.shape[1], -1)).double()
    scores = grouped @ key.double()[:, :, None].transpose(-1, -2) * scale
    scores = scores.masked_fill(~attn_mask[:, :, None], -torch.inf)
    return (scores.softmax(dim=-1) @ value.double()[:, :, None]).flatten(1, 2).float().to(query.dtype)
