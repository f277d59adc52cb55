"""The forward of a module replaced inside of accelerate's hook.

A ``forward`` around the hook's would keep the layer from being streamed (``_offload.transfer.module_groups``), and
would get weights that are not there yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gemma4_compat._engine.runtime import in_place

_HOOKED = "_old_forward"  # accelerate's name for the forward that its hook calls


def is_hooked(module: Any) -> bool:
    """Whether ``_old_forward`` has to be replaced instead of ``forward``."""
    return _HOOKED in vars(module)


def restore(module: Any, function: Callable[..., Any]) -> None:
    """Undo a replacement by this function, wherever a hook has put it since."""
    for name in ("forward", _HOOKED):
        in_place.restore(module, name, function)
