"""Views of modules in which quantized linears report the dtype they compute with, not their storage dtype.

Upstream casts to ``linear.weight.dtype``, which is ``uint8`` or ``int8`` for a quantized weight. Upstream's function
gets a view instead of the module; all other attributes of the view are the module's.
"""

from __future__ import annotations

from typing import Any

from gemma4_compat._engine.runtime.views import PlainView


def for_quantized(module: Any, dtype: Any, *names: str) -> Any:
    """``module`` itself, or a view if one of its linears (or clipped linears) ``names`` has a quantized weight.

    In the view the weights of these linears report ``dtype``.
    """
    for name in names:
        linear = getattr(module, name)
        if not getattr(linear, "linear", linear).weight.dtype.is_floating_point:
            return PlainView(module, **{name: _Linear(getattr(module, name), dtype) for name in names})
    return module


class _Linear:
    def __init__(self, module: Any, dtype: Any) -> None:
        self._module = module
        self.linear = self  # of a clipped linear
        self.weight = _Weight(dtype)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._module(*args, **kwargs)


class _Weight:
    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
