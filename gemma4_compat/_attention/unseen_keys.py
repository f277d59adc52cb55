"""Fully masked queries, as padding produces.

cuDNN's attention may give NaN for the gradient of such a query, where other kernels give zero. Here such a query sees
every key, and its output is set to zero: then its output and its gradient are zero, and no other row changes.
"""

from __future__ import annotations

from typing import Any

from gemma4_compat._attention import layers
from gemma4_compat._attention.flash import WIDEST

ID = "transformers-cudnn-padding"

#: The compute capability from which PyTorch uses cuDNN for attention without being asked: Hopper.
_FIRST = 9


def attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
    """Replaces transformers' function for ``sdpa``, with finite gradients for the queries of a Gemma 4."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward as upstream

    if (
        attention_mask is None
        or not query.requires_grad
        or query.shape[-1] > WIDEST
        or not layers.is_text(module)
        or not takes_cudnn(query.device)
    ):
        return upstream(module, query, key, value, attention_mask, **kwargs)
    if attention_mask.is_floating_point():  # added to the scores
        empty = (attention_mask == float("-inf")).all(dim=-1, keepdim=True)
        filled = attention_mask.masked_fill(empty, 0.0)
    else:
        empty = ~attention_mask.any(dim=-1, keepdim=True)
        filled = attention_mask | empty
    found, weights = upstream(module, query, key, value, filled, **kwargs)
    return found.masked_fill(empty.transpose(1, 2), 0.0), weights  # (batch, queries, heads, width)


def no_cuda(_late: bool) -> bool:
    """Whether this torch has no CUDA."""
    import torch

    return torch.version.cuda is None


def takes_cudnn(device: Any) -> bool:
    """Whether PyTorch may choose cuDNN for attention on ``device``. Does not wait for the device."""
    import torch

    if device.type != "cuda" or torch.cuda.get_device_properties(device).major < _FIRST:
        return False
    # Dynamo does not trace this setting; if cuDNN is off, the results are the same.
    return torch.compiler.is_compiling() or bool(torch.backends.cuda.cudnn_sdp_enabled())
