"""Products of a few rows with 4-bit weights by tensor cores, with custom numerics.

bitsandbytes rounds each weight and each product to the dtype of the input. That takes instructions: on an H100 its
kernel, and ours with its bits (:mod:`nf4_exact`), are compute-bound. Here, a byte of two packed weights is looked up
as a pair of float16 values, tensor cores multiply pairs by the inputs and add up, and the sum of each 64 inputs is
multiplied by their scale. Inputs in bfloat16 become float16 with a factor for each 64, so they lose nothing. What is
rounded is the table of 16 values (``nf4_gemv.cuh``), sums in ``float``, and the result.

Integers of compressed-tensors are looked up in the same way. They have no error in float16, and are not rounded after
they were multiplied by their scales, as unpacked ones are. Half a chunk may have a scale of its own.

A row of the input has the same bits whatever the others are, and wherever the weights are. Up to eight rows are one
multiplication by tensor cores. For more (``nf4_rows.cuh``), a kernel before turns the input into float16 once, where
each block would do it again, and what is looked up of a weight is multiplied by up to 32 rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from gemma4_compat._kernels.programs import Kernel, instance, kinds
from gemma4_compat._kernels.specs import nf4_exact, products
from gemma4_compat._kernels.specs.nf4_exact import Format

#: The name in an operation's signature.
OPERATION = "4-bit product by tensor cores"
#: Rows of the weight that a warp multiplies at once, and inputs: a chunk has one scale.
TILE, CHUNK = 16, 64
#: Up to so many rows, each block turns the input into float16 itself, for every tile; of more, up to so many inputs.
OWN_ROWS, _OWN_INPUTS = 8, 512
_PREPARING = 128  # threads of a block that prepares an input: a warp for eight rows and a chunk
_LONG, _FEW = 4096, 2048  # inputs and rows of weights that occupy a GPU only if their blocks have more warps
#: Warps of an SM: if there is more to do, a block multiplies several tiles, one after the other.
_WARPS = 16


class Product(nf4_exact.Product):
    """A product in this arithmetic."""

    operation = OPERATION

    @property
    def code(self) -> products.Code:
        """The order of additions depends on the warps of a block."""
        return _code(self.format, warps_of(self.format.inputs, self.outputs))

    def blocks(self, outputs: Sequence[int]) -> list[int]:
        """As many as a GPU has room for, or fewer; for each part of the rows as many."""
        tiles, parts = [-(-number // TILE) for number in outputs], products.parts_of(self.format.rows)[0]
        warps = warps_of(self.format.inputs, self.outputs)
        rounds = -(-sum(tiles) * parts // resident(warps, self.input.device))
        return [-(-number // rounds) * parts for number in tiles]

    def prepared(self) -> tuple[Kernel, Any] | None:
        """Writes the numbers of more than eight rows in float16, and their factors."""
        import torch

        rows, inputs = self.format.rows, self.format.inputs
        if not _is_prepared(self.format):
            return None
        parts, each = products.parts_of(rows)
        given = kinds()[self.format.dtype].name, inputs, rows, min(self.format.blocksize, CHUNK)
        pieces = parts * each * (inputs // CHUNK)  # of eight rows and a chunk
        words = products.FEW_ROWS * (CHUNK // 2 + 1)  # of 32 bits
        written = torch.empty(pieces * words, dtype=torch.int32, device=self.input.device)
        text = instance("nf4_rows.cuh", "gemv::prepare", *given, _PREPARING)
        grid = (-(-pieces // (_PREPARING // 32)), 1)
        return Kernel(text, (self.input, written), 1, (), _PREPARING, grid), written


def match(*args: Any, **kwargs: Any) -> Product | None:
    """The product that ``bitsandbytes::gemm_4bit`` with these arguments asks for; None if it does not suit.

    For the type ``int4`` the packed weight and the scales are those of :mod:`packed_linear`.
    """
    import torch

    found = nf4_exact.gemm(products.MAX_ROWS, *args, **kwargs)
    if found is None or found.format.dtype == torch.float32 or found.format.inputs % CHUNK:
        return None
    is_half = found.format.quant_type == products.INT4 and found.format.blocksize == CHUNK // 2
    if found.format.blocksize % CHUNK and not is_half:
        return None
    return Product(found.format, found.input, found.weight, found.outputs)


def warps_of(inputs: int, outputs: int) -> int:
    """Warps of a block for a weight of this shape."""
    return 16 if inputs > _LONG and outputs <= _FEW else 8


def resident(warps: int, device: Any) -> int:
    """Blocks of so many warps that a GPU has room for."""
    return _WARPS // warps * multiprocessors(device)


def _is_prepared(layout: Format) -> bool:
    """Whether a kernel before turns the input into float16."""
    return layout.rows > OWN_ROWS and layout.inputs > _OWN_INPUTS


@functools.cache
def _code(layout: Format, warps: int) -> products.Code:
    name, values = kinds()[layout.dtype].name, layout.quant_type.capitalize()
    arguments = name, values, layout.inputs, layout.rows, warps, layout.blocksize, layout.nested, layout.bias
    rest = "Word16", layout.fields, warps * 32, 16 // warps
    if layout.rows <= OWN_ROWS:
        return products.Code("nf4_gemv", arguments, *rest)
    return products.Code("nf4_rows", (*arguments, _is_prepared(layout)), *rest)


@functools.cache
def multiprocessors(device: Any) -> int:
    """How many a GPU has."""
    import torch

    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1
