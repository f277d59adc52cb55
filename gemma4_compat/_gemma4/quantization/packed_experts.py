"""The forward of experts in 4 bits from their packed weights, where a kernel multiplies by these."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import wrap_torch_function

from gemma4_compat._gemma4.quantization import expert_storage
from gemma4_compat._gemma4.quantization.experts import NAMES


@wrap_torch_function(lambda given, *_: (given,))  # type: ignore[untyped-decorator]
def multiplies(given: Any, chosen: Any, parameters: Any) -> bool:
    """Whether a ``TorchFunctionMode`` computes :func:`product` for all of these parameters.

    Args:
        given: ``[tokens, hidden size]``.
        chosen: int64, ``[products]``: the experts, equally many for each token.
        parameters: the 4-bit weights of all experts, in memory that the device can read.
    """
    return False


@wrap_torch_function(lambda given, *_: (given,))  # type: ignore[untyped-decorator]
def product(given: Any, chosen: Any, parameter: Any) -> Any:
    """The products of rows, ``[rows, inputs]``, with an expert's weights each: ``[products, rows of a weight]``."""
    each = given.repeat_interleave(len(chosen) // len(given), dim=0)
    return torch.bmm(expert_storage.dequantized(parameter, chosen), each.unsqueeze(2)).squeeze(2)


def forward(module: Any, weights: Mapping[str, Any], hidden_states: Any, chosen: Any, top_k_weights: Any) -> Any:
    """What an experts module returns, ``[tokens, hidden size]``.

    Args:
        module: the experts.
        weights: their 4-bit parameters by name, in memory of the device.
        hidden_states: ``[tokens, hidden size]``.
        chosen: int64, ``[tokens * k]``: where the experts of each token are in the weights.
        top_k_weights: ``[tokens, k]``.
    """
    up, down = (weights[name] for name in NAMES)
    gate, value = product(hidden_states, chosen, up).chunk(2, dim=-1)
    found = product(module.act_fn(gate) * value, chosen, down)
    weighted = (found * top_k_weights.reshape(-1, 1)).float().unflatten(0, top_k_weights.shape)
    # One after the other: the order of PyTorch's sums depends on how many tokens there are.
    return functools.reduce(torch.add, weighted.unbind(1)).to(hidden_states.dtype)
