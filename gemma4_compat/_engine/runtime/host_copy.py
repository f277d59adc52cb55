"""A tensor's values on their way to the host."""

from __future__ import annotations

from typing import Any


class HostCopy:
    """Copies a tensor now, in the order of the current stream; only who reads the copy waits, and not for later work.

    Args:
        tensor: on any device.
    """

    def __init__(self, tensor: Any) -> None:
        import torch

        self._values, self._there = tensor.to("cpu", non_blocking=True, copy=True), None
        if tensor.device.type == "cuda":
            self._there = torch.cuda.Event()
            self._there.record(torch.cuda.current_stream(tensor.device))

    def tolist(self) -> list[Any]:
        """Its values, once the device has copied them."""
        if self._there is not None:
            self._there.synchronize()
        return list(self._values.tolist())
