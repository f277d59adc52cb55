"""Products of up to eight rows with 4-bit weights by tensor cores, with custom numerics.

bitsandbytes rounds each weight and each product to the dtype of the input. That takes instructions: on an H100 its
kernel, and ours with its bits (:mod:`nf4_exact`), are compute-bound. Here, a byte of two packed weights is looked up
as a pair of float16 values, tensor cores multiply pairs by the inputs and add up, and the sum of each 64 inputs is
multiplied by their scale. Inputs in bfloat16 become float16 with a factor for each 64, so they lose nothing. What is
rounded is the table of 16 values (``nf4_gemv.cuh``), sums in ``float``, and the result.

A row of the input has the same bits whatever the others are, and wherever the weights are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gemma4_compat._kernels.programs import Kernel, kinds
from gemma4_compat._kernels.specs import nf4_exact, several
from gemma4_compat._kernels.specs.nf4_exact import Format

#: The name in an operation's signature.
OPERATION = "4-bit product by tensor cores"
#: Rows of the input.
MAX_ROWS = 8
#: Weights of one launch.
MAX_WEIGHTS = 4
#: Rows of the weight that a warp multiplies at once, and inputs: a chunk has one scale.
TILE, CHUNK = 16, 64
_LONG, _FEW = 4096, 2048  # inputs and rows of weights that occupy a GPU only if their blocks have more warps
#: Warps of an SM: if there is more to do, a block multiplies several tiles, one after the other.
_WARPS = 16


@dataclass(frozen=True, eq=False)
class Product(nf4_exact.Product):
    """As there, in this arithmetic."""

    @property
    def signature(self) -> tuple[Any, ...]:
        """As for other operations; nothing of PyTorch's to compare it with."""
        return OPERATION, tuple(self.format), self.format.dtype

    @property
    def warps(self) -> int:
        """How many a block has."""
        return warps_of(self.format.inputs, self.outputs)


def match(*args: Any, **kwargs: Any) -> Product | None:
    """The product that ``bitsandbytes::gemm_4bit`` with these arguments asks for; None if it does not suit."""
    import torch

    found = nf4_exact.gemm(MAX_ROWS, *args, **kwargs)
    if found is None or found.format.dtype == torch.float32 or found.format.blocksize < CHUNK:
        return None
    return Product(found.format, found.input, found.weight, found.outputs)


def can_fuse(one: Product, other: Product) -> bool:
    """Whether one launch may compute both: they have the same format and read the same input."""
    return nf4_exact.can_fuse(one, other) and one.warps == other.warps


def kernel_of(wanted: Sequence[Product], results: Sequence[Any]) -> Kernel:
    """The kernel that writes the results of products that :func:`can_fuse`, each ``[..., outputs]``."""
    layout = wanted[0].format
    tiles = [-(-product.outputs // TILE) for product in wanted]
    warps = wanted[0].warps
    rounds = -(-sum(tiles) // (_WARPS // warps * multiprocessors(wanted[0].input.device)))
    blocks = [-(-number // rounds) for number in tiles]
    sizes: list[int | float] = []
    for product, number in zip(wanted, blocks, strict=True):
        sizes += (product.outputs, number)
    weights = [tensor for product in wanted for tensor in product.weight]
    tensors = (wanted[0].input, *weights, *results)
    return Kernel(
        text_of(layout, warps, len(wanted)), tensors, len(results), tuple(sizes), warps * 32, (sum(blocks), 1)
    )


def warps_of(inputs: int, outputs: int) -> int:
    """Warps of a block for a weight of this shape; the order of additions depends on it."""
    return 16 if inputs > _LONG and outputs <= _FEW else 8


@functools.cache
def text_of(layout: Format, warps: int, weights: int) -> str:
    """The kernel for products of one input with so many weights."""
    name, shift = kinds()[layout.dtype].name, layout.blocksize.bit_length() - 1
    options = layout.quant_type.capitalize(), layout.inputs, layout.rows, warps, shift
    return several.text_of(
        "nf4_gemv",
        (name, *options, layout.nested, layout.bias),
        "Word16",
        layout.fields,
        weights,
        f"{warps * 32}, {16 // warps}",
    )


@functools.cache
def multiprocessors(device: Any) -> int:
    """How many a GPU has."""
    import torch

    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1
