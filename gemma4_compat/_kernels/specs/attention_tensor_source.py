"""Attention of 16-bit numbers by matrix units: the same parts as :data:`attention_source.ATTENTION`.

Products of 16-bit numbers are exact, and sums are in ``float``. A share of the softmax is the sum of two 16-bit
numbers, so it is off by 2 ** -17 of itself at most (bfloat16; less in float16).

A matrix unit multiplies 16 rows of 16 numbers by 8 columns: rows are keys, or dimensions of values; columns are heads.
Every lane reads words of 16 bytes, and what it reads is what it must hand over, in an order that is the same for both
factors. Scores: a quarter of a key's dimensions for each warp. Values: 64 dimensions for each warp.
"""

from __future__ import annotations

from typing import Any

from gemma4_compat._kernels.programs import kinds

_MULTIPLY = r"""#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.@NAME@.@NAME@.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#elif defined(__CUDA_ARCH__) && @HALF@
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(b0));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a2), "r"(a3), "r"(b1));
#else
    #pragma unroll 1
    for (int s = 0; s < 4; ++s)
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int a_lane = (lane & 28) + s, b_lane = col * 8 + i % 2 * 4 + s;
        const unsigned int a[2] = {__shfl_sync(0xffffffffu, i < 2 ? a0 : a1, a_lane),
          __shfl_sync(0xffffffffu, i < 2 ? a2 : a3, a_lane)};
        const unsigned int b[2] = {__shfl_sync(0xffffffffu, b0, b_lane), __shfl_sync(0xffffffffu, b1, b_lane)};
        #pragma unroll
        for (int k = 0; k < 2; ++k) {
          c[i] = fmaf(@A_LOW@, @B_LOW@, c[i]);
          c[i] = fmaf(@A_HIGH@, @B_HIGH@, c[i]);
        }
      }
#endif"""


def multiplication(dtype: Any) -> str:
    """C for ``c += a * b``: by the matrix units, or where there are none for the dtype, by each lane, which computes
    four numbers of the result.

    Args:
        dtype: of ``a0`` to ``a3``, ``b0`` and ``b1``: pairs of bfloat16 or float16 numbers. ``c`` has four floats.
    """
    load = kinds()[dtype].load
    half = load.startswith("from_f16")
    text = _MULTIPLY.replace("@HALF@", str(int(half))).replace("@NAME@", "f16" if half else "bf16")
    for name in "AB":
        text = text.replace(f"@{name}_LOW@", load.format(f"(u16){name.lower()}[k]"))
        text = text.replace(f"@{name}_HIGH@", load.format(f"(u16)({name.lower()}[k] >> 16)"))
    return text
