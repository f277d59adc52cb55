"""The kernel that dequantizes a 4-bit weight (:mod:`dequantizing`), and its trial.

The arithmetic is bitsandbytes', operation by operation: ``code * scale`` in float, rounded once; a nested scale is
``code * scale + offset``. As in bitsandbytes' kernels, products that are subnormal are zero; PyTorch adds the offset.

Integers (``INT4``) are those of :mod:`packed_linear`: a value times its scale, rounded to the dtype of both. A
block may have any multiple of :data:`VALUES`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from gemma4_compat._kernels.programs import Kernel, instance, kinds
from gemma4_compat._kernels.specs.expert_rows import Format, code_of
from gemma4_compat._kernels.specs.products import INT4

#: The name in an operation's signature.
OPERATION = "4-bit weight"
#: Values of a word.
VALUES = 8
_THREADS = 256  # of a block: as many as a code of nested scales has values
_WORDS = 4  # of a thread


def kernel_of(packed: Any, layout: Format, scales: Sequence[Any], result: Any) -> Kernel:
    """The kernel that writes a weight.

    Args:
        packed: two values per byte, the address a multiple of 4.
        layout: the format of the weight.
        scales: float32, one per block; nested: uint8, one per block; float32, one per ``layout.nested`` of those;
            float32, (256,); and a single float32. Integers: one per block, in the format's dtype.
        result: contiguous, in the format's dtype, a multiple of :data:`VALUES` values.
    """
    words = result.numel() // VALUES
    text, grid = text_of(layout), (-(-words // (_THREADS * _WORDS)), 1)
    if layout.quant_type == INT4:
        return Kernel(text, (packed, *scales, result), 1, (words, layout.blocksize // VALUES), _THREADS, grid)
    shift = (layout.blocksize // VALUES).bit_length() - 1
    sizes = (words, shift, shift + max(layout.nested.bit_length() - 1, 0))
    code = code_of(layout.quant_type, result.device)
    tensors = (packed, *(scales if layout.nested else (*scales, code, code, code)), code, result)
    return Kernel(text, tensors, 1, sizes, _THREADS, grid)


def text_of(layout: Format) -> str:
    """The kernel's text for weights of this format."""
    name = kinds()[layout.dtype].name
    if layout.quant_type == INT4:
        return instance("nf4_dequantize.cuh", "unpacked", name)
    return instance("nf4_dequantize.cuh", "dequantized", name, "unsigned char" if layout.nested else "float")


def trial(signature: tuple[Any, ...], device: Any) -> tuple[Kernel, Any, Any]:
    """The kernel of this format for random bytes, the weight that it writes, and the weight that bitsandbytes
    computes.
    """
    import torch

    _, (quant_type, blocksize, nested), dtype = signature
    layout = Format(quant_type, blocksize, nested, dtype)
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> Any:
        return torch.randint(0, 256, shape, generator=generator, device=device, dtype=torch.uint8)

    def numbers(*shape: int) -> Any:
        return torch.rand(shape, generator=generator, device=device)

    shape = 33, 10 * layout.blocksize  # more scales than a nested one has, and no whole number of blocks of threads
    packed, number = drawn(math.prod(shape) // 2, 1), 33 * 10
    absmax = numbers(number)
    scales: tuple[Any, ...] = (absmax,)
    if quant_type == INT4:
        packed, scales = packed.view(shape[0], -1).view(torch.int32), (absmax.to(dtype),)
    elif layout.nested:
        scales = (drawn(number), numbers(-(-number // layout.nested)), numbers(256) - 0.5, numbers())
    elif device.type == "cuda":  # bitsandbytes does not flush subnormal numbers on a CPU
        absmax[:3] = torch.tensor([2e-38, 1e-40, 3e38], device=device)
    result = torch.empty(shape, dtype=layout.dtype, device=device)
    return kernel_of(packed, layout, scales, result), result, computed(packed, shape, layout, scales)


def computed(packed: Any, shape: Sequence[int], layout: Format, scales: Sequence[Any]) -> Any:
    """The weight as bitsandbytes or PyTorch computes it, in several kernels; arguments as for :func:`kernel_of`."""
    import torch

    from gemma4_compat._gemma4.quantization import packed_linear

    absmax = scales[0]
    if layout.quant_type == INT4:
        return packed_linear.unpacked(packed, absmax.view(shape[0], -1), shape[1], 4, layout.dtype)
    if layout.nested:
        quantized, nested, codes, offset = scales
        dequantize = torch.ops.bitsandbytes.dequantize_blockwise.default
        absmax = dequantize(quantized, nested, codes, layout.nested, torch.float32) + offset
    dequantize = torch.ops.bitsandbytes.dequantize_4bit.default
    return dequantize(packed, absmax, layout.blocksize, layout.quant_type, shape, layout.dtype)
