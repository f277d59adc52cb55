"""Products of a few rows with the 4-bit weights of an expert each, with the numerics of :mod:`nf4_gemv`.

A token of a mixture of experts is multiplied by some experts' weights. Upstream gathers and dequantizes these, and
multiplies what it has written. Here each product reads the packed weights of its expert in place. It has the bits of
:mod:`nf4_gemv` for that row and that weight, whatever else a batch names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gemma4_compat._kernels.programs import Kernel, instance, kinds
from gemma4_compat._kernels.specs import nf4_gemv, products

#: Products of a launch at most: of :data:`products.MAX_ROWS` tokens, with eight experts each.
MOST = 8 * products.MAX_ROWS
#: Scales of a nested one, by which the kernel shifts, and values that a quantized scale may have.
_NESTED = 256


def arguments(parameter: Any) -> tuple[Any, ...]:
    """What :func:`kernel_of` gets of a 4-bit parameter of all experts."""
    state = parameter.quant_state
    given = parameter.data, state.shape, state.absmax, state.blocksize, state.quant_type
    if not state.nested:
        return given
    nested = state.state2
    scales = nested.absmax.view(state.shape[0], -1)
    return (*given[:2], scales, *given[3:], state.absmax, nested.code, state.offset)


def kernel_of(
    given: Any,
    chosen: Any,
    packed: Any,
    shape: Sequence[int],
    absmax: Any,
    blocksize: int,
    quant_type: str,
    absmax_8bit: Any = None,
    absmax_code: Any = None,
    absmax_offset: Any = None,
) -> tuple[Kernel, Any] | None:
    """The kernel that multiplies, and its results, ``[products, rows of a weight]``, not yet written.

    Args:
        given: ``[rows, inputs]``; each row is multiplied by equally many experts.
        chosen: int64, ``[products]``: the experts, row by row.
        packed: two weights in a byte, of all experts.
        shape: ``(experts, rows of a weight, inputs)``.
        absmax: scales, ``[experts, ...]``, or those of scales.
        blocksize: weights of a scale.
        quant_type: ``nf4`` or ``fp4``.
        absmax_8bit: scales that are quantized, ``[experts, ...]``.
        absmax_code: their 256 values.
        absmax_offset: what is added to them, of each expert.

    Returns:
        None for what does not suit.
    """
    import torch

    count, height, width = shape
    scales, is_nested = height * width // blocksize, absmax_8bit is not None
    of_scales = [absmax_8bit, absmax_code, absmax_offset] if is_nested else [absmax] * 3
    tensors = [given, chosen, packed, absmax, *of_scales]
    expected = [torch.int64, packed.dtype, torch.float32, torch.uint8 if is_nested else torch.float32]
    if (
        given.dtype not in (torch.bfloat16, torch.float16)
        # The kernel reads them as these dtypes.
        or [tensor.dtype for tensor in tensors[1:]] != [*expected, torch.float32, torch.float32]
        or given.ndim != 2
        or given.shape[1] != width
        or len(chosen) % max(len(given), 1)
        or not 0 < len(chosen) <= MOST
        or width % nf4_gemv.CHUNK
        or blocksize % nf4_gemv.CHUNK
        or quant_type not in ("nf4", "fp4")
        or absmax.numel() != count * (-(-scales // _NESTED) if is_nested else scales)
        or (is_nested and [one.numel() for one in of_scales] != [count * scales, _NESTED, count])
        or packed.numel() * packed.element_size() * 2 != count * height * width
        or packed.data_ptr() % 16
        or given.data_ptr() % 16
        or any(tensor.device != given.device or not tensor.is_contiguous() for tensor in tensors)
    ):
        return None
    warps, tiles = nf4_gemv.warps_of(width, height), -(-height // nf4_gemv.TILE)
    rounds = -(-tiles * len(chosen) // nf4_gemv.resident(warps, given.device))
    blocks = -(-tiles // rounds)
    kind = kinds()[given.dtype].name, quant_type.capitalize(), width, warps, blocksize, is_nested
    result = given.new_empty((len(chosen), height))
    sizes = height, blocks, len(chosen) // len(given), absmax.numel() // count
    text, grid = instance("expert_products.cuh", "expert_products", *kind), (len(chosen) * blocks, 1)
    return Kernel(text, (*(one.detach() for one in tensors), result), 1, sizes, warps * 32, grid), result
