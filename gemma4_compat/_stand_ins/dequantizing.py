"""The kernel that dequantizes 4-bit weights, on machines without a GPU: PyTorch computes what it would."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch


@contextlib.contextmanager
def standing_in(compilers: dict[str, Any]) -> Iterator[None]:
    """Inside, the CPU has this kernel, unless there are kernels for it already.

    Args:
        compilers: ``gemma4_compat._decoding.kernels.COMPILERS``.
    """
    with mock.patch.dict(compilers, {"cpu": Compiler} | compilers):
        yield


class Compiler:
    """With the protocol of ``gemma4_compat._decoding.kernels``.

    Attributes:
        launches: how often the kernel was launched.
    """

    launches = 0

    def __init__(self, device: Any) -> None:
        """The kernel is for the CPU, whatever the device."""

    @staticmethod
    def obstacle() -> str | None:
        """None: a CPU can always compute it."""

    def compiled(self, texts: Sequence[str]) -> list[Callable[[Any], None]]:
        """The same function for each text."""
        return [self._launch for _ in texts]

    def _launch(self, kernel: Any) -> None:
        type(self).launches += 1
        packed, *scales, code, result = kernel.tensors
        _, shift, *nested_shift = kernel.sizes
        absmax = scales[0]
        if nested_shift:
            quantized, nested, codes, offset = scales
            absmax = codes[quantized.int()] * _each(nested, nested_shift[0] - shift, quantized.numel()) + offset
        given = packed.reshape(-1).view(torch.uint8)
        numbers = torch.stack([given >> 4, given & 15], dim=1).reshape(-1)
        values = code[numbers.int()] * _each(absmax, shift + 3, numbers.numel())  # words of 8 values
        result.copy_(values.to(result.dtype).view_as(result))


def _each(scales: torch.Tensor, shift: int, number: int) -> torch.Tensor:
    """The scale of each of so many values."""
    return scales.repeat_interleave(1 << shift)[:number]
