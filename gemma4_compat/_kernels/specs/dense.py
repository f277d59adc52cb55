"""Products of a few rows with weights that are not quantized, with custom numerics: LoRA's A and B, the head.

Each row of the input is multiplied as if it were the only one, so a sequence has the same bits whatever else is in its
batch; cuBLAS chooses another kernel for each number of rows. Products are exact and sums are in ``float``; only the
result is rounded. There are three kernels, and the weight decides which: a *short* product has at most ``SHORT``
inputs, like LoRA's B, and is a pointwise operation (``"dot"`` in :mod:`pointwise`), computed where its result is used;
of the others, a block takes a row of a *small* weight, like LoRA's A, and a warp takes four rows of a large one, like
the head.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from gemma4_compat._kernels.programs import kinds
from gemma4_compat._kernels.specs import products

#: The name in an operation's signature.
OPERATION = "dense product"
#: Inputs of a short product.
SHORT = 64
_SMALL = 512  # rows of a weight
_THREADS = 256
_WARP_ROWS = 4  # of a large weight, that a warp takes


class Format(NamedTuple):
    """What a kernel's text depends on, apart from the number of weights.

    Attributes:
        given: dtype of the input.
        dtype: of the weight and the result.
        rows: of the input.
        inputs: of each row.
        small: whether a block takes a row of the weight.
        bias: whether there is one.
        aligned: whether input and weight can be read in 128-bit loads. The bits are the same.
    """

    given: Any
    dtype: Any
    rows: int
    inputs: int
    small: bool
    bias: bool
    aligned: bool


class Product(products.Product):
    """A product; its input has the weight's dtype, or is the numbers before they were cast to it."""

    operation = OPERATION
    most = 8

    @property
    def code(self) -> products.Code:
        """One kernel is for small weights, and one for large ones."""
        return _code(self.format)

    def blocks(self, outputs: Sequence[int]) -> list[int]:
        """Each has as many rows of the weight, and of the input at most eight."""
        each = 1 if self.format.small else _THREADS // 32 * _WARP_ROWS
        parts = -(-self.format.rows // products.FEW_ROWS)
        return [-(-number // each) * parts for number in outputs]


def supports(given: Any, weight: Any, bias: Any = None) -> bool:
    """Whether the kernels can compute ``torch.nn.functional.linear(given, weight, bias)``."""
    import torch

    known = kinds()
    if type(given) not in (torch.Tensor, torch.nn.Parameter) or type(weight) not in (torch.Tensor, torch.nn.Parameter):
        return False
    if weight.ndim != 2 or given.ndim < 1 or given.shape[-1] != weight.shape[1] or not given.numel():
        return False
    inputs = weight.shape[1]
    return (
        weight.dtype in known
        and weight.dtype != torch.bool
        and given.dtype == weight.dtype
        and given.numel() // inputs <= products.MAX_ROWS
        and weight.numel() < 1 << 31
        and (inputs <= SHORT or not inputs * weight.dtype.itemsize % 16)
        and all(tensor.is_contiguous() and tensor.device == given.device for tensor in (given, weight))
        and (bias is None or (bias.dtype == weight.dtype and bias.device == given.device and bias.is_contiguous()))
    )


def is_large(weight: Any) -> bool:
    """Whether a warp takes rows of this weight."""
    outputs, inputs = weight.shape
    return bool(outputs > _SMALL and inputs > SHORT)


def product(given: Any, weight: Any, bias: Any = None) -> Product:
    """The product that :func:`supports`; ``given`` may be what was cast to the weight's dtype."""
    outputs, inputs = weight.shape
    rows = given.numel() // inputs
    aligned = not (given.data_ptr() % 16 or weight.data_ptr() % 16)
    layout = Format(given.dtype, weight.dtype, rows, inputs, outputs <= _SMALL, bias is not None, aligned)
    tensors = (weight,) if bias is None else (weight, bias)
    return Product(layout, given, tuple(tensor.detach() for tensor in tensors), outputs)


@functools.cache
def _code(layout: Format) -> products.Code:
    kind, given = kinds()[layout.dtype], kinds()[layout.given]
    weight = f"const {kind.c}"
    return products.Code(
        "dense::small" if layout.small else "dense::large",
        (kind.name, given.name, layout.rows, layout.inputs, layout.bias, layout.aligned),
        given.c,
        ((weight, "weight"), (weight, "bias") if layout.bias else None, (kind.c, "output")),
        _THREADS,
    )
