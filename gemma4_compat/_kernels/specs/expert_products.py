"""Products of tokens with the 4-bit weights of the experts that they are sent to, with custom numerics.

PyTorch dequantizes these weights, gathers them for each token, and multiplies. Its bits depend on how many tokens
there are. Here each pair of a token and an expert has the arithmetic of one row in :mod:`nf4_gemv`, and reads packed
weights. So a token has the same bits whatever the others are. From pinned host memory packed weights are copied first:
the bus wants longer reads than a product makes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gemma4_compat._gemma4.quantization import expert_storage
from gemma4_compat._kernels.programs import Kernel, instance, kinds
from gemma4_compat._kernels.specs import nf4_gemv

_WARPS = 8  # of a block
_ROUNDS = 8  # tiles of the weight that a block multiplies at most, one after the other
_WORD = 16
_NESTED = 256  # scales of a scale


class Weights(NamedTuple):
    """The 4-bit weights of all experts.

    Attributes:
        packed: two weights in a byte.
        absmax: scales, or the scales of nested ones; float32.
        quantized: nested scales; None, as the next two, where scales are in float32.
        codes: 256 numbers.
        offset: one for each expert.
        shape: experts, rows and columns.
        blocksize: weights of a scale.
        quant_type: ``nf4`` or ``fp4``.
    """

    packed: Any
    absmax: Any
    quantized: Any
    codes: Any
    offset: Any
    shape: list[int]
    blocksize: int
    quant_type: str

    def of(self, chosen: Any) -> Weights:
        """Those of the experts ``chosen``, in this order, copied to its device."""
        import torch

        count, *matrix = self.shape

        def rows(tensor: Any) -> Any:
            return None if tensor is None else expert_storage.rows_of(tensor.view(count, -1), chosen)

        return self._replace(
            packed=rows(self.packed.view(torch.uint8)),
            absmax=rows(self.absmax),
            quantized=rows(self.quantized),
            offset=rows(self.offset),
            shape=[len(chosen), *matrix],
        )


def weights_of(parameter: Any, dtype: Any, device: Any) -> Weights | None:
    """Those of a parameter that a kernel on this device can multiply by numbers of a dtype; None if it cannot."""
    import torch

    state = getattr(parameter, "quant_state", None)
    if state is None or dtype not in (torch.bfloat16, torch.float16) or state.dtype != dtype:
        return None
    inner, of_type = state.nested, (list(state.shape), state.blocksize, state.quant_type)
    if inner:
        found = Weights(parameter.data, state.state2.absmax, state.absmax, state.state2.code, state.offset, *of_type)
    else:
        found = Weights(parameter.data, state.absmax, None, None, None, *of_type)
    count, height, width = found.shape
    scales = count * height * width // found.blocksize
    expected = [torch.float32, torch.uint8, torch.float32, torch.float32] if inner else [torch.float32]
    tensors = [one for one in found[:5] if one is not None]
    if (
        [one.dtype for one in tensors[1:]] != expected
        or any(not one.is_contiguous() or one.device != device for one in tensors)
        or found.packed.data_ptr() % _WORD
        or width % nf4_gemv.CHUNK
        or found.blocksize not in (64, 128, 256, 512)
        or width % found.blocksize
        or found.packed.numel() * found.packed.element_size() * 2 != count * height * width
        or state.absmax.numel() != scales
        or (inner and (state.state2.blocksize != _NESTED or found.absmax.numel() < scales // _NESTED))
        or (
            inner and (found.absmax.numel() % count or found.codes.numel() != _NESTED or found.offset.numel() != count)
        )
    ):
        return None
    return found


def kernel_of(given: Any, chosen: Any, weights: Weights) -> tuple[Kernel, Any]:
    """The kernel that multiplies, and its result, (pairs, rows of a weight), not yet written.

    Args:
        given: (tokens, columns of a weight), contiguous.
        chosen: int64, the experts of each token, all one after the other: the pairs.
        weights: of all experts.
    """
    import torch

    count, outputs, inputs = weights.shape
    pairs, nested = chosen.numel(), weights.quantized is not None
    result = torch.empty((pairs, outputs), dtype=given.dtype, device=given.device)
    tiles = -(-outputs // nf4_gemv.TILE)
    room = 16 // _WARPS * nf4_gemv.multiprocessors(given.device)
    rounds = min(-(-tiles * pairs // room), _ROUNDS)
    values, shift = weights.quant_type.capitalize(), weights.blocksize.bit_length() - 1
    arguments = kinds()[given.dtype].name, values, inputs, _WARPS, shift, nested
    text = instance("expert_products.cuh", "expert_products", *arguments)
    scales = weights[2:5] if nested else (weights.absmax,) * 3  # in place of what is not read
    tensors = given, chosen, weights.packed, weights.absmax, *scales, result
    sizes = outputs, pairs // len(given), weights.absmax.numel() // count if nested else 0
    return Kernel(text, tensors, 1, sizes, _WARPS * 32, (-(-tiles // rounds), pairs)), result
