"""The kernel that dequantizes 4-bit weights, on machines without a GPU: bitsandbytes' operations for the CPU."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

#: The fix, which gets this kernel if it is loaded; a standalone script does not load it.
REPAIR = "gemma4_compat._kernels.kernels"


@contextlib.contextmanager
def kernel(device: Any) -> Iterator[str | None]:
    """Inside, the CPU has this kernel, unless it has one already. Yields why ``device`` has none; None if it has."""
    import torch

    repair = sys.modules.get(REPAIR)
    if repair is None:
        yield None
        return
    with mock.patch.dict(repair.COMPILERS, {"cpu": Compiler} | repair.COMPILERS):
        yield repair.COMPILERS[torch.device(device).type].unsupported_reason()


def computed(packed: Any, state: Any) -> Any:
    """The weight of a state with nested scales, by bitsandbytes' operations one by one."""
    import torch

    operations, inner = torch.ops.bitsandbytes, state.state2
    scales = operations.dequantize_blockwise.default(
        state.absmax, inner.absmax, inner.code, inner.blocksize, torch.float32
    )
    arguments = (state.blocksize, state.quant_type, state.shape, state.dtype)
    return operations.dequantize_4bit.default(packed, scales + state.offset, *arguments)


class Compiler:
    """With the protocol of ``gemma4_compat._kernels.kernels``.

    Attributes:
        launches: how often the kernel was launched.
    """

    launches = 0

    def __init__(self, device: Any) -> None:
        """The kernel is for the CPU, whatever the device."""

    @staticmethod
    def unsupported_reason() -> str | None:
        """None: a CPU can always compute it."""

    def compiled(self, texts: Sequence[str]) -> list[Callable[[Any], None]]:
        """The same function for each text."""
        return [self._launch for _ in texts]

    def _launch(self, kernel: Any) -> None:
        import torch

        type(self).launches += 1
        packed, absmax, scales, codes, offset, code, result = kernel.tensors
        _, shift, nested_shift = kernel.sizes  # the sizes of blocks, in words of 8 values
        operations = torch.ops.bitsandbytes
        if absmax.dtype == torch.uint8:
            size = 1 << (nested_shift - shift)
            absmax = operations.dequantize_blockwise.default(absmax, scales, codes, size, torch.float32) + offset
        quant_type = "nf4" if code[0] == -1 else "fp4"
        shape, dtype = result.shape, result.dtype
        result.copy_(operations.dequantize_4bit.default(packed, absmax, 8 << shift, quant_type, shape, dtype))
