"""Fully masked queries, as padding produces.

cuDNN's attention may give NaN for the gradient of such a query, where other kernels give zero. Here such a query sees
every key, and its output is set to zero: then its output and its gradient are zero, and no other row changes.
"""

from __future__ import annotations

from typing import Any

from gemma4_compat._gemma4 import host
from gemma4_compat._gemma4.accelerate import attached
from gemma4_compat._gemma4.attention import layers, tracing
from gemma4_compat._gemma4.attention.flash import WIDEST

ID = "transformers-cudnn-padding"

#: The compute capability from which PyTorch uses cuDNN for attention without being asked: Hopper.
_FIRST = (9, 0)
#: Elements of a mask from which a copy costs more than waiting for the device once: 64 MiB of them.
_LARGE = 2**26


def attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
    """Replaces transformers' function for ``sdpa``, with finite gradients for the queries of a Gemma 4."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward as upstream

    if (
        attention_mask is None
        or not query.requires_grad
        or query.shape[-1] > WIDEST
        or not layers.is_text(module)
        or not takes_cudnn(query.device)
        or _show_all_queries_a_key(attention_mask)
    ):
        return upstream(module, query, key, value, attention_mask, **kwargs)
    empty = _unseen(attention_mask)
    filled = attention_mask.masked_fill(empty, 0.0 if attention_mask.is_floating_point() else True)
    found, weights = upstream(module, query, key, value, filled, **kwargs)
    return found.masked_fill(empty.transpose(1, 2), 0.0), weights  # (batch, queries, heads, width)


def _show_all_queries_a_key(mask: Any) -> bool:
    """Whether a large mask does, which is looked at once until it is written to. False for others: nothing waits."""
    import torch

    if torch.compiler.is_compiling() or not tracing.is_real(mask) or mask.numel() < _LARGE or tracing.is_traced(mask):
        return False
    return tracing.once(mask, attached.SEEN, _shows_each_query_a_key)


def _shows_each_query_a_key(mask: Any) -> bool:
    return not _unseen(mask).any()


def _unseen(mask: Any) -> Any:
    """Queries that see no key: (batch, heads, queries, 1), bool."""
    if mask.is_floating_point():  # added to the scores
        return (mask == float("-inf")).all(dim=-1, keepdim=True)
    return ~mask.any(dim=-1, keepdim=True)


def no_cuda(_late: bool) -> bool:
    """Whether this torch has no CUDA."""
    import torch

    return torch.version.cuda is None


def takes_cudnn(device: Any) -> bool:
    """Whether PyTorch may choose cuDNN for attention on ``device``. Does not wait for the device."""
    import torch

    found = host.capability(device)
    if found is None or found < _FIRST:
        return False
    # Dynamo does not trace this setting; if cuDNN is off, the results are the same.
    return torch.compiler.is_compiling() or bool(torch.backends.cuda.cudnn_sdp_enabled())
