"""Gradient checkpointing as the installed releases do it: when it drops the cache, and the hooks that save tensors."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

FLAG = "gradient_checkpointing"
_LAYERS = "transformers.modeling_layers"
_TOP = "_top_saved_tensors_default_hooks"


def drops_cache(module: Any) -> bool:
    """Whether a module in training mode drops the cache in forwards without gradients.

    Before transformers 5.24, it does if its checkpointing is on. With ``transformers-generate-checkpointing`` applied
    it does not: its flag reads False without gradients.
    """
    import torch

    with torch.no_grad():
        return bool(getattr(module, FLAG, False)) and not asks_for_gradients()


def asks_for_gradients() -> bool:
    """Whether this release checkpoints a layer only where gradients are recorded. Needs the loaded transformers."""
    return _asks_for_gradients(sys.modules[_LAYERS].GradientCheckpointingLayer)


def is_in_forward() -> bool:
    """Whether this release checkpoints a layer inside its ``forward``. Needs the loaded transformers."""
    return "__call__" not in vars(sys.modules[_LAYERS].GradientCheckpointingLayer)


@functools.cache
def _asks_for_gradients(layer: type) -> bool:
    functions = [inspect.unwrap(getattr(value, "__func__", value)) for value in vars(layer).values()]
    codes = [function.__code__ for function in functions if hasattr(function, "__code__")]
    return any("is_grad_enabled" in _names(code) for code in codes)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def can_see_hooks() -> bool:
    """Whether :func:`saved_tensors_hooks` sees any: it asks a private function that older releases of torch lack."""
    import torch

    return hasattr(torch._C._autograd, _TOP)


def saved_tensors_hooks() -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | None:
    """The innermost of the hooks that ``torch.autograd.graph.saved_tensors_hooks`` has set in this thread.

    Returns:
        None if there are none, or if :func:`can_see_hooks` is False.
    """
    import torch

    if not can_see_hooks():
        return None
    found: tuple[Callable[[Any], Any], Callable[[Any], Any]] | None = getattr(torch._C._autograd, _TOP)(False)
    return found
