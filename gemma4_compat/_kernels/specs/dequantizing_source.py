"""The kernel that dequantizes a 4-bit weight (:mod:`dequantizing`), and its trial.

The arithmetic is bitsandbytes', operation by operation: ``code * scale`` in float, rounded once; a nested scale is
``code * scale + offset``. As in bitsandbytes' kernels, products that are subnormal are zero; PyTorch adds the offset.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from gemma4_compat._kernels.programs import Kernel, kinds
from gemma4_compat._kernels.specs.expert_rows import code_of

#: The name in an operation's signature.
OPERATION = "4-bit weight"
#: Values per scale, and scales per nested scale.
BLOCKSIZES = frozenset(1 << power for power in range(5, 13))
#: Values of a word.
VALUES = 8
_THREADS = 256  # of a block: as many as a code of nested scales has values
_WORDS = 4  # of a thread

_TEXT = """extern "C" __global__ void __launch_bounds__({threads}) dequantized({parameters}) {{
__shared__ float values[16];
{shared}
const unsigned int first = blockIdx.x * {span}u + threadIdx.x;
unsigned int words[{words}];
float scales[{words}];
#pragma unroll
for (int j = 0; j < {words}; ++j) {{
  const unsigned int at = first + j * {threads}u;
  if (at < n0) {{
    words[j] = __ldcs(packed + at);
    {load}
  }}
}}
if (threadIdx.x < 16) values[threadIdx.x] = code[threadIdx.x];
{known}
__syncthreads();
#pragma unroll
for (int j = 0; j < {words}; ++j) {{
  const unsigned int at = first + j * {threads}u;
  if (at < n0) {{
    {scale}
    #pragma unroll
    for (int k = 0; k < {pieces}; ++k) {{
      Word16 piece;
      #pragma unroll
      for (int l = 0; l < 4; ++l) {{
        {unpack}
      }}
      out[(unsigned long long)at * {pieces}u + k] = piece;
    }}
  }}
}}
}}
"""
_LOAD = "scales[j] = absmax[at >> n1];"
_NESTED_SHARED = """__shared__ float known[{threads}];
unsigned char quantized[{words}];"""
_NESTED_KNOWN = "known[threadIdx.x] = codes[threadIdx.x]; const float shift = *offset;"
_NESTED_LOAD = "quantized[j] = absmax[at >> n1]; scales[j] = nested[at >> n2];"
_NESTED_SCALE = "scales[j] = __fadd_rn(multiply_flushed(known[quantized[j]], scales[j]), shift);"
#: bitsandbytes packs the first of two values in the high half of a byte.
_UNPACK = """const unsigned int byte = words[j] >> {shift};
        const float first_value = multiply_flushed(values[(byte >> 4) & 15u], scales[j]);
        const float second_value = multiply_flushed(values[byte & 15u], scales[j]);
        piece.part[l] = {stored};"""


class Format(NamedTuple):
    """What decides the bits of a weight.

    Attributes:
        quant_type: ``nf4`` or ``fp4``.
        blocksize: values per scale.
        nested: scales per nested scale; 0 where scales are in float32.
        dtype: of the weight, a ``torch.dtype``.
    """

    quant_type: str
    blocksize: int
    nested: int
    dtype: Any

    @property
    def signature(self) -> tuple[Any, ...]:
        """As for other operations: name, operands, dtype."""
        return OPERATION, tuple(self)[:3], self.dtype


def kernel_of(packed: Any, layout: Format, scales: Sequence[Any], result: Any) -> Kernel:
    """The kernel that writes a weight.

    Args:
        packed: two values per byte, the address a multiple of 4.
        layout: the format of the weight.
        scales: float32, one per block; nested: uint8, one per block; float32, one per ``layout.nested`` of those;
            float32, (256,); and a single float32.
        result: contiguous, in the format's dtype, a multiple of :data:`VALUES` values.
    """
    words = result.numel() // VALUES
    shift = (layout.blocksize // VALUES).bit_length() - 1
    sizes = (words, shift, shift + layout.nested.bit_length() - 1) if layout.nested else (words, shift)
    tensors = (packed, *scales, code_of(layout.quant_type, result.device), result)
    grid = (-(-words // (_THREADS * _WORDS)), 1)
    return Kernel(text_of(layout.dtype, nested=layout.nested > 0), tensors, 1, sizes, _THREADS, grid)


@functools.cache
def text_of(dtype: Any, *, nested: bool) -> str:
    """The kernel's CUDA C for weights of this dtype."""
    parameters = ["const unsigned int* __restrict__ packed"]
    if nested:
        parameters += ["const unsigned char* __restrict__ absmax", "const float* __restrict__ nested"]
        parameters += ["const float* __restrict__ codes", "const float* __restrict__ offset"]
    else:
        parameters.append("const float* __restrict__ absmax")
    parameters += ["const float* __restrict__ code", "Word16* __restrict__ out"]
    parameters += [f"unsigned int n{number}" for number in range(3 if nested else 2)]
    counts = {"threads": _THREADS, "words": _WORDS}
    wide = dtype.itemsize == 4
    if wide:
        shift, stored = "(k * 16 + (l / 2) * 8)", "__float_as_uint(l % 2 ? second_value : first_value)"
    else:
        kind = kinds()[dtype].load.partition("(")[0].removeprefix("from_")
        shift, stored = "(l * 8)", f"pair_{kind}(first_value, second_value)"
    return _TEXT.format(
        parameters=", ".join(parameters),
        shared=_NESTED_SHARED.format(**counts) if nested else "",
        span=_THREADS * _WORDS,
        load=_NESTED_LOAD if nested else _LOAD,
        known=_NESTED_KNOWN if nested else "",
        scale=_NESTED_SCALE if nested else "",
        pieces=2 if wide else 1,
        unpack=_UNPACK.format(shift=shift, stored=stored),
        **counts,
    )


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
    if layout.nested:
        scales = (drawn(number), numbers(-(-number // layout.nested)), numbers(256) - 0.5, numbers())
    elif device.type == "cuda":  # bitsandbytes does not flush subnormal numbers on a CPU
        absmax[:3] = torch.tensor([2e-38, 1e-40, 3e38], device=device)
    result = torch.empty(shape, dtype=layout.dtype, device=device)
    return kernel_of(packed, layout, scales, result), result, computed(packed, shape, layout, scales)


def computed(packed: Any, shape: Sequence[int], layout: Format, scales: Sequence[Any]) -> Any:
    """The weight as bitsandbytes computes it, in up to three kernels; arguments as for :func:`kernel_of`."""
    import torch

    absmax = scales[0]
    if layout.nested:
        quantized, nested, codes, offset = scales
        dequantize = torch.ops.bitsandbytes.dequantize_blockwise.default
        absmax = dequantize(quantized, nested, codes, layout.nested, torch.float32) + offset
    dequantize = torch.ops.bitsandbytes.dequantize_4bit.default
    return dequantize(packed, absmax, layout.blocksize, layout.quant_type, shape, layout.dtype)
