"""The order of the rotary frequencies' buffers, the same in every process."""

from __future__ import annotations

from typing import Any


def order_buffers(module: Any) -> None:
    """Put a module's buffers in the order of their names."""
    for name in sorted(module._buffers):
        module._buffers[name] = module._buffers.pop(name)
