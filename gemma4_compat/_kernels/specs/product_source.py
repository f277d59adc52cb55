"""The CUDA C of products with 4-bit weights (:mod:`products`)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from gemma4_compat._kernels.programs import kinds
from gemma4_compat._kernels.specs import several

#: The name in an operation's signature.
OPERATION = "4-bit product"
WARPS = 8  # of a block: as many threads as a code of nested scales has values
_GROUP = 1024  # inputs that a warp reads at once
_THREAD = 32  # of them, of one thread
_SHARED = 47 << 10  # bytes of a block for inputs; nested scales take another 1 KiB


class Format(NamedTuple):
    """What a kernel's text depends on, apart from the number of weights.

    Attributes:
        operation: ``gemm_4bit`` (bitsandbytes 0.50 and newer) or ``gemv_4bit`` (older): the order of additions.
        dtype: of inputs and results, a ``torch.dtype``.
        rows: of the input.
        inputs: of each row.
        quant_type: ``nf4`` or ``fp4``.
        blocksize: weights per scale.
        nested: whether scales are quantized.
        bias: whether there is one.
    """

    operation: str
    dtype: Any
    rows: int
    inputs: int
    quant_type: str
    blocksize: int
    nested: bool
    bias: bool

    @property
    def signature(self) -> tuple[Any, ...]:
        """As for other operations: name, operands, dtype."""
        return OPERATION, tuple(self)[:1] + tuple(self)[2:], self.dtype

    @property
    def fields(self) -> list[tuple[str, str] | None]:
        """C types and names of what a weight has, in the order of ``FourBit`` in ``four_bit.cuh``."""
        kind = kinds()[self.dtype].c
        nested = [("const unsigned char", "quantized"), ("const float", "codes"), ("const float", "offset")]
        return [
            ("const unsigned char", "packed"),
            ("const float", "absmax"),
            *(nested if self.nested else [None] * 3),
            ("const float", "values") if self.operation == "gemv_4bit" else None,
            (f"const {kind}", "bias") if self.bias else None,
            (kind, "output"),
        ]


def fits(layout: Format) -> bool:
    """Whether a kernel can read rows of so many inputs."""
    inputs = layout.inputs
    return not inputs % _THREAD and layout.dtype.itemsize * min(inputs, _GROUP) * layout.rows <= _SHARED


def rows_of_a_warp(inputs: int) -> int:
    """How many rows share the last group of inputs."""
    rest = inputs % _GROUP
    return _GROUP // rest if rest in (_GROUP // 2, _GROUP // 4) else 1


@functools.cache
def text_of(layout: Format, weights: int) -> str:
    """The kernel for products of one input with so many weights."""
    name, shift = kinds()[layout.dtype].name, layout.blocksize.bit_length() - 1
    values = (layout.quant_type or "nf4").capitalize()
    is_gemm = layout.operation == "gemm_4bit"
    return several.text_of(
        "nf4_exact",
        (name, values, layout.inputs, layout.rows, shift, is_gemm, layout.nested, layout.bias),
        "Word16",
        layout.fields,
        weights,
        str(WARPS * 32),
    )
