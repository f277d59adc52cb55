"""The kernel that dequantizes 4-bit weights, on machines without a GPU: bitsandbytes' operations for the CPU."""

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
        packed, absmax, *nested, code, result = kernel.tensors
        _, shift, *nested_shift = kernel.sizes  # the sizes of blocks, in words of 8 values
        operations = torch.ops.bitsandbytes
        if nested:
            scales, codes, offset = nested
            size = 1 << (nested_shift[0] - shift)
            absmax = operations.dequantize_blockwise.default(absmax, scales, codes, size, torch.float32) + offset
        quant_type = "nf4" if code[0] == -1 else "fp4"
        shape, dtype = result.shape, result.dtype
        result.copy_(operations.dequantize_4bit.default(packed, absmax, 8 << shift, quant_type, shape, dtype))
