"""Whether the values of a tensor can be looked at where attention is computed."""

from __future__ import annotations

from typing import Any

from gemma4_compat._models import prefill


def is_real(tensor: Any) -> bool:
    """Whether it has values, and no subclass makes something else of it."""
    import torch

    return type(tensor) is torch.Tensor and not tensor.is_meta


def is_traced(tensor: Any) -> bool:
    """Whether something follows what is computed that a look at the mask would disturb."""
    import torch

    return (
        torch.jit.is_tracing()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or prefill.is_captured()
        or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
    )
