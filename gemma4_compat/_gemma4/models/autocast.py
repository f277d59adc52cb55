"""What ``torch.autocast`` does on a device. Imports nothing upstream at module level."""

from __future__ import annotations

from typing import Any


def dtype_on(device: Any) -> Any:
    """The dtype to which an active autocast casts on ``device`` (a ``torch.device``); None if none is active.

    Some devices ("meta") do not support autocast.
    """
    import torch

    kind = device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)
