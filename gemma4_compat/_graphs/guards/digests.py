"""The number for the values of a model's weights, read for each ``generate``: from its second time on by one launch.

E2B in 4 bits has three thousand tensors, and summing each takes Python 0.16 s (H200) where the GPU needs 14 ms. It
reads them beside what else it does, and nobody waits for the number who has none to compare it with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from gemma4_compat._gemma4.state import contents
from gemma4_compat._graphs import recording

_log = logging.getLogger("gemma4_compat")


class Number:
    """A number that a GPU may still be computing: to compare it waits for that.

    Args:
        tensor: int64 [], computed on the current stream.
    """

    def __init__(self, tensor: Any) -> None:
        import torch

        self._value: Any = tensor
        if tensor.device.type == "cuda":
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(tensor.device))
        else:
            self._value = int(tensor)

    def __int__(self) -> int:
        if not isinstance(self._value, int):
            self._ready.synchronize()
            self._value = int(self._value)
        return int(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Number) and int(self) == int(other)

    __hash__ = None  # type: ignore[assignment]  # it would have to wait

    def hold_back(self) -> None:
        """Have the current stream wait until the weights are read, before somebody writes to them."""
        import torch

        if not isinstance(self._value, int):
            torch.cuda.current_stream(self._value.device).wait_event(self._ready)


class Digest:
    """:func:`contents.digest` of tensors that stay where they are as long as this is used."""

    def __init__(self) -> None:
        self._times = 0
        self._recorded: dict[str, tuple[recording.Recording, Any]] = {}  # by device: what computes, and its output
        self._streams: dict[str, Any] = {}  # by device

    def __call__(self, tensors: Callable[[], Iterable[Any]]) -> tuple[Number, ...]:
        """The number of each device.

        Args:
            tensors: the tensors, always the same ones in the same order and places. The caller has checked that.
        """
        self._times += 1
        if self._times == 2:  # a single `generate` pays for no recording
            self._record(tensors())
        found = {device: self._launched(device) for device in self._recorded}
        rest = (tensor for tensor in tensors() if str(tensor.device) not in self._recorded)
        found |= {device: Number(contents.number(memory)) for device, memory in contents.by_device(rest).items()}
        return tuple([number for _, number in sorted(found.items())])

    def _launched(self, device: str) -> Number:
        """The number of a device, which computes it beside what it is given next."""
        import torch

        launched, output = self._recorded[device]
        if output.device.type != "cuda":
            launched.replay()
            return Number(output.clone())
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(output.device)
        stream.wait_stream(torch.cuda.current_stream(output.device))
        with torch.cuda.stream(stream):
            launched.replay()
            return Number(output.clone())

    def _record(self, tensors: Iterable[Any]) -> None:
        import torch

        there = list(tensors)
        if any(hasattr(tensor, "__tensor_flatten__") and type(tensor) is not torch.Tensor for tensor in there):
            return  # the addresses of what it is made of are not watched
        for device in {str(tensor.device): tensor.device for tensor in there}.values():
            kind = recording.RECORDERS.get(device.type)
            if kind is None or kind.unsupported_reason() is not None:
                continue
            here, made = [tensor for tensor in there if tensor.device == device], kind(device, kind.new_pool())
            if not any(tensor.numel() for tensor in here):
                continue  # there is nothing to sum
            try:
                with recording.capturing.held():
                    self._recorded[str(device)] = made, made.capture(lambda here=here: _number(here))  # type: ignore[misc]
            except RuntimeError as error:
                _log.debug("gemma4_compat: the values of weights are summed eagerly: %s", error)


def _number(tensors: list[Any]) -> Any:
    """One number for tensors of one device, int64 []; None for tensors without memory."""
    return next(map(contents.number, contents.by_device(tensors).values()), None)
