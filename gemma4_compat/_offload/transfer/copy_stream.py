"""The stream on which module groups are copied to a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gemma4_compat._offload.transfer.module_groups import ModuleGroup


class CopyStream:
    """The stream on which module groups are copied to a device, and its order with the streams that compute.

    Only this stream allocates groups and reuses their memory. A copy waits for the computations with the groups that
    were freed before it; a computation waits for the copy of its group.
    """

    def __init__(self, device: Any) -> None:
        import torch

        self.device, self._cuda = device, torch.cuda
        self._stream = self._cuda.Stream(device) if device.type == "cuda" else None
        #: Called before a group's memory is freed: it launches the computations that still need the group.
        self.settle: Callable[[], None] | None = None
        self._computed: dict[Any, Any] = {}  # by computing stream: the event after its last use of a group

    def start_copy(self, group: ModuleGroup, size: int) -> None:
        """Allocate ``size`` bytes for the group and issue its copy, without waiting for it."""
        if self._stream is None:
            group.allocate(size)
            group.copy_from_host()
        else:
            with self._cuda.stream(self._stream):
                for event in self._computed.values():
                    self._stream.wait_event(event)
                group.allocate(size)  # and with deterministic algorithms also writes: torch fills new memory
                group.copy_from_host()
                group.copied = group.copied or self._cuda.Event()
                group.copied.record(self._stream)
        group.on_device = True

    def wait_for_copy(self, group: ModuleGroup) -> None:
        """Make the current stream wait for the group's copy; the host does not wait.

        Everything the current stream computes from now on finds the group's weights. Nothing else waits for them, and
        without a stream (on a CPU) the copy is complete when :meth:`start_copy` returns.
        """
        if self._stream is not None:
            self._cuda.current_stream(self.device).wait_event(group.copied)

    def forget_computed(self) -> None:
        """Wait for no computation before now: it is over, or part of a capture."""
        self._computed.clear()

    def follow_current_stream(self) -> None:
        """Make copies follow what the current stream does now: they are part of its capture from here on."""
        if self._stream is not None:
            self._stream.wait_stream(self._cuda.current_stream(self.device))

    def join_current_stream(self) -> None:
        """Make the current stream wait for every copy."""
        if self._stream is not None:
            self._cuda.current_stream(self.device).wait_stream(self._stream)

    def synchronize(self) -> None:
        """Wait for everything on the device."""
        if self._stream is not None:
            self._cuda.synchronize(self.device)

    def free(self, group: ModuleGroup) -> None:
        """Free the group's memory after what the current stream has computed with it."""
        if not group.on_device:
            return
        if self.settle is not None:
            self.settle()
        if self._stream is not None:
            stream = self._cuda.current_stream(self.device)
            event = self._computed.get(stream)
            if event is None:
                event = self._computed[stream] = self._cuda.Event()
            event.record(stream)
        group.free()
        group.on_device = False
