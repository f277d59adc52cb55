"""The norms of a model's text layers in chunks, which :mod:`mlp` asks for.

An RMSNorm computes in float32, and autograd keeps the float32 copy of 16-bit inputs, twice as large, until the
backward pass. Here only the inputs are kept, and float32 exists for one chunk at a time. A norm computes each row by
itself, so outputs and gradients have upstream's bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from gemma4_compat._gemma4.accelerate import attached
from gemma4_compat._training import mlp_chunks, modules

ATTRIBUTE = attached.CHUNKED_NORM
#: Bytes of a chunk in float32; its backward pass has five such tensors at a time. A chunk has more than 512 rows:
#: torch's CUDA kernels may add the numbers of a row in another order if there are fewer rows.
BYTES = 64 << 20
_MODELS = ("Gemma4TextModel", "Gemma4UnifiedTextModel")


def ask(model: Any, tokens: int) -> None:
    """Have the norms of text layers compute in chunks in training with more than ``tokens`` tokens."""
    for norm in found(model):
        setattr(norm, ATTRIBUTE, tokens)
        modules.replace_forward(norm, functools.partial(forward, norm))


def leave(model: Any) -> None:
    """Undo :func:`ask`."""
    for norm in found(model):
        vars(norm).pop(ATTRIBUTE, None)
        modules.restore_forward(norm, forward)


def found(model: Any) -> Iterator[Any]:
    """The norms of the text models in ``model``."""
    for text in (module for module in model.modules() if type(module).__name__ in _MODELS):
        yield from (module for module in text.modules() if type(module).__name__.endswith("RMSNorm"))


def forward(norm: Any, original: Callable[..., Any], hidden_states: Any) -> Any:
    """A norm's forward: (..., features) -> (..., features), in chunks if that was asked for and saves memory.

    Norms whose weight is trained are left whole: its gradient is a sum over rows.
    """
    tokens = vars(norm).get(ATTRIBUTE)
    if tokens is None or not modules.trains(norm):
        return original(hidden_states)
    shape = hidden_states.shape  # (tokens, features), (rows, tokens, features) or (rows, tokens, heads, features)
    if hidden_states.itemsize > 2 or shape[:-1][:2].numel() <= tokens:
        return original(hidden_states)
    if modules.trained(norm) or not modules.is_on(norm, "RMSNorm") or modules.unsupported_reason(norm):
        return original(hidden_states)
    return mlp_chunks.apply(
        original,
        hidden_states,
        tokens=max(1, BYTES // (4 * shape[-1])),
        around=functools.partial(modules.onloaded, norm),
        draws=False,
    )
