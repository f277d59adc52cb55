"""What ``torch.autocast`` does on a device. Imports nothing upstream at module level."""

from __future__ import annotations

from typing import Any


def dtype_on(device: Any) -> Any:
    """The dtype that an autocast which is on makes of what it casts on ``device`` (a ``torch.device``); else None.

    Some devices ("meta") know no autocast.
    """
    import torch

    kind = device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)
