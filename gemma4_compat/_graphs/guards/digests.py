"""The number for the values of a model's weights, read for each ``generate``: from its second time on by one launch.

E2B in 4 bits has three thousand tensors, and summing each takes Python 0.16 s (H200) where the GPU needs milliseconds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from gemma4_compat._gemma4.state import contents
from gemma4_compat._graphs import recording

_log = logging.getLogger("gemma4_compat")


class Digest:
    """:func:`contents.digest` of tensors that stay where they are as long as this is used."""

    def __init__(self) -> None:
        self._times = 0
        self._recorded: dict[str, tuple[recording.Recording, Any]] = {}  # by device: what computes, and its output

    def __call__(self, tensors: Callable[[], Iterable[Any]]) -> tuple[int, ...]:
        """The number of each device.

        Args:
            tensors: the tensors, always the same ones in the same order and places. The caller has checked that.
        """
        self._times += 1
        if self._times == 2:  # a single `generate` pays for no recording
            self._record(tensors())
        found: dict[str, Any] = {}
        for device, (launched, output) in self._recorded.items():
            launched.replay()
            found[device] = output
        rest = (tensor for tensor in tensors() if str(tensor.device) not in self._recorded)
        found |= {device: contents.number(memory) for device, memory in contents.by_device(rest).items()}
        return tuple([int(output) for _, output in sorted(found.items()) if output is not None])

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
            try:
                with recording.capturing.held():
                    self._recorded[str(device)] = made, made.capture(lambda here=here: _number(here))  # type: ignore[misc]
            except RuntimeError as error:
                _log.debug("gemma4_compat: the values of weights are summed eagerly: %s", error)


def _number(tensors: list[Any]) -> Any:
    """One number for tensors of one device, int64 []; None for tensors without memory."""
    return next(map(contents.number, contents.by_device(tensors).values()), None)
