"""The buffers of rotary embeddings: the same order in every process, and a dtype that no cast narrows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from gemma4_compat._engine import changes
from gemma4_compat._engine.runtime import in_place

CAST = "transformers-rotary-cast"


def order_buffers(module: Any) -> None:
    """Put a module's buffers in the order of their names."""
    for name in sorted(module._buffers):
        module._buffers[name] = module._buffers.pop(name)


def keep_frequencies(module: Any) -> None:
    """Make casts of the module, or of a module around it, leave its frequencies as precise as they are.

    Only while the patch :data:`CAST` is on. A deep copy does the same; a pickle keeps no trace of it.
    """
    in_place.replace(module, "_apply", functools.partial(_apply, module))


def _apply(module: Any, below: Any, fn: Callable[[Any], Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces ``nn.Module._apply``, which every cast goes through."""
    before = dict(module._buffers) if changes.is_on(type(module).__init__, CAST) else {}
    below(fn, *args, **kwargs)
    for name, value in before.items():
        now = module._buffers[name]
        if value is not None and now is not None and _is_narrower(now.dtype, value.dtype):
            module._buffers[name] = value.to(now.device)
    return module


def _is_narrower(dtype: Any, other: Any) -> bool:
    return bool(dtype.is_floating_point and other.is_floating_point and dtype.itemsize < other.itemsize)
