"""The CUDA C of 4-bit products by matrix units (:mod:`matrix_products`).

A warp multiplies 16 rows of the weight (a *tile*) by up to eight rows of the input, 64 inputs (a *chunk*) at a time.
Matrix units take inputs in any order that is the same for both factors, so each lane hands over what it reads. The
warps of a block take the chunks in turns, and their sums are added up at the end.
"""

from __future__ import annotations

import functools
import struct

from gemma4_compat._kernels.specs import several
from gemma4_compat._kernels.specs.attention_tensor_source import multiplication
from gemma4_compat._kernels.specs.product_source import VALUES, Format

#: Rows of the weight that a warp multiplies at once, and inputs: a chunk has one scale.
TILE, CHUNK = 16, 64
_LONG, _FEW = 4096, 2048  # inputs and rows of weights that occupy a GPU only if their blocks have more warps
_AT_ONCE = {True: 4, False: 3}  # chunks of a warp, by whether the input is in shared memory: registers
_SHARED = 47 << 10  # bytes of a block
_TABLE = 32 << 10
#: The 16 values of a format are multiplied by this and rounded to float16. NF4: of four million numbers between 1 and
#: 2, this one gives the least errors, 4.5e-5 (root mean square) and 1.5e-9 (mean). Values that are rounded after they
#: were multiplied by scales have 8.7e-4 in bfloat16 and 1.1e-4 in float16 (root mean square). FP4 has no error.
_FACTORS = {"nf4": 1.9247651100158691, "fp4": 192.0}


def warps_of(inputs: int, outputs: int) -> int:
    """Warps of a block for a weight of this shape; the order of additions depends on it."""
    return 16 if inputs > _LONG and outputs <= _FEW else 8


@functools.cache
def text_of(layout: Format, warps: int, weights: int) -> str:
    """The kernel for products of one input with so many weights."""
    import torch

    is_bf16 = layout.dtype == torch.bfloat16
    names = [("const unsigned char*", "packed"), ("const float*", "absmax")]
    if layout.nested:
        names += [("const unsigned char*", "quantized"), ("const float*", "codes"), ("const float*", "offset")]
    if layout.bias:
        names.append(("const u16*", "bias"))
    chosen = [f"{c} {name} = {name}0;" for c, name in names]
    chosen += several.choice([*names, ("", "blocks")], weights)
    chunks = -(-layout.inputs // (CHUNK * warps))  # of a warp
    buffers = 2 if layout.rows <= 2 else 1
    taken = _TABLE + 1024 * layout.nested + buffers * warps * layout.rows * TILE * 4
    is_staged = taken + layout.rows * (layout.inputs // CHUNK * (CHUNK * 2 + 4) + 16) <= _SHARED
    groups = -(-chunks // _AT_ONCE[is_staged])
    return _filled(
        (_TEXT, _STAGED if is_staged else _READ, _BF16 if is_bf16 else _F16, _NESTED if layout.nested else _PLAIN),
        {
            "PARAMETERS": ", ".join(several.parameters("const Word16* __restrict__ input", names, "u16", weights)),
            "CHOSEN": "\n  ".join(chosen),
            "INPUTS": layout.inputs,
            "ROWS": layout.rows,
            "WARPS": warps,
            "GROUPS": groups,
            "AT_ONCE": -(-chunks // groups),
            "BUFFERS": buffers,
            "SHIFT": layout.blocksize.bit_length() - 1,
            "VALUES": ", ".join(_pairs(layout.quant_type)),
            "UNIT": f"{1 / _FACTORS[layout.quant_type]!r}f",
            "MULTIPLY": multiplication(torch.float16),
            "BIAS": "value = __fadd_rn(value, from_@KIND@(bias[first + r]));" if layout.bias else "",
            "THREADS": warps * 32,
            "RESIDENT": 16 // warps,
            "UNROLL": groups if is_staged and groups < 3 else 1,
            "KIND": "bf16" if is_bf16 else "f16",
        },
    )


def _filled(texts: tuple[str | dict[str, str], ...], numbers: dict[str, object]) -> str:
    text, *parts = texts
    assert isinstance(text, str)
    for part in (*parts, numbers):
        assert isinstance(part, dict)
        for name, value in part.items():
            text = text.replace(f"@{name}@", str(value))
    return text


def _pairs(quant_type: str) -> list[str]:
    """C for the 16 values of a format in float16, two in each word."""
    values = [float(value.rstrip("f")) * _FACTORS[quant_type] for value in VALUES[quant_type]]
    return [f"0x{int.from_bytes(struct.pack('<2e', *pair), 'little'):08x}u" for pair in zip(values[::2], values[1::2])]


_PLAIN = {
    "SCALES": "",
    "READ_SCALE": "scales[half] = __ldg(absmax + at);",
    "CODES": "",
    "SCALE": "scales[half]",
}
_NESTED = {
    "SCALES": "unsigned char quantized_scales[2] = {0, 0};\n  __shared__ float known[256];",
    "READ_SCALE": "scales[half] = __ldg(absmax + (at >> 8));\n        quantized_scales[half] = __ldg(quantized + at);",
    "CODES": "if (thread < 256) known[thread] = __ldg(codes + thread);\n  const float shift = __ldg(offset);",
    "SCALE": "fma_flushed(known[quantized_scales[half]], scales[half], shift)",
}
#: float16 has less range than bfloat16: the largest number of a chunk becomes 2 ** 14 to 2 ** 15, which a factor takes
#: back. What float16 cannot hold then is 2 ** -38 of it.
_BF16 = {
    "HALVES": r"""auto halves = [](Word16* words, int count, int lanes) {
    float largest = 0.0f;
    #pragma unroll
    for (int i = 0; i < count * 4; ++i) {
      const unsigned int pair = words[i / 4].part[i % 4];
      largest = fmaxf(largest, fmaxf(fabsf(__uint_as_float(pair << 16)), fabsf(__uint_as_float(pair & 0xffff0000u))));
    }
    #pragma unroll
    for (int by = 1; by < lanes; by *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, by));
    const int exponent = min(268 - (int)(__float_as_uint(largest) >> 23), 253);
    const float up = __uint_as_float((unsigned int)exponent << 23);
    #pragma unroll
    for (int i = 0; i < count * 4; ++i) {
      const unsigned int pair = words[i / 4].part[i % 4];
      words[i / 4].part[i % 4] = pair_f16(__uint_as_float(pair << 16) * up, __uint_as_float(pair & 0xffff0000u) * up);
    }
    return __uint_as_float((unsigned int)(254 - exponent) << 23);
  };"""
}
_F16 = {"HALVES": "auto halves = [](Word16*, int, int) { return 1.0f; };"}

#: The whole input is in shared memory, or every warp reads what it needs.
_STAGED = {
    "SHARED": "__shared__ Word16 given[ROWS * LINE];\n  __shared__ float factors[CHUNKS * ROWS];",
    "STAGE": r"""constexpr int WORDS = ROWS * CHUNKS * 8;
  for (int w = thread; w < (WORDS + 31) / 32 * 32; w += WARPS * 32) {  // whole warps
    const int m = w / (CHUNKS * 8), k = w % (CHUNKS * 8);
    Word16 word = input[min(w, WORDS - 1)];
    const float factor = halves(&word, 1, 8);
    if (w < WORDS) given[m * LINE + k] = word;
    if (w < WORDS && k % 8 == 0) factors[k / 8 * ROWS + m] = factor;
  }""",
    "NOW": "",
    "X": r"""const Word16* const at = given + min(row, ROWS - 1) * LINE + chunk * 8 + col * 2;
        const Word16 x[2] = {at[0], at[1]};
        const float factor0 = factors[chunk * ROWS + min(col * 2, ROWS - 1)];
        const float factor1 = factors[chunk * ROWS + min(col * 2 + 1, ROWS - 1)];""",
}
_READ = {
    "SHARED": "",
    "STAGE": r"""Word16 ahead[AT_ONCE][2];
  auto read = [&](int group) {
    #pragma unroll
    for (int i = 0; i < AT_ONCE * 2; ++i) {
      const int chunk = (group * AT_ONCE + i / 2) * WARPS + warp;
      if (chunk < CHUNKS) ahead[i / 2][i % 2] = input[min(row, ROWS - 1) * (K / 8) + chunk * 8 + col * 2 + i % 2];
    }
  };
  read(0);""",
    "NOW": r"""Word16 here[AT_ONCE][2];
      #pragma unroll
      for (int i = 0; i < AT_ONCE * 2; ++i) here[i / 2][i % 2] = ahead[i / 2][i % 2];
      read(is_last ? 0 : group + 1);""",
    "X": r"""Word16 (&x)[2] = here[u];
        const float factor = halves(x, 2, 4);
        const float factor0 = ROWS > 1 ? __shfl_sync(0xffffffffu, factor, col * 8) : factor;
        const float factor1 = ROWS > 1 ? __shfl_sync(0xffffffffu, factor, col * 8 + 4) : factor;""",
}

_TEXT = r"""extern "C" __global__ void __launch_bounds__(@THREADS@, @RESIDENT@) matrix_product(@PARAMETERS@) {
  constexpr int K = @INPUTS@, ROWS = @ROWS@, WARPS = @WARPS@, CHUNKS = K / 64, GROUPS = @GROUPS@, AT_ONCE = @AT_ONCE@;
  constexpr int SHIFT = @SHIFT@, BUFFERS = @BUFFERS@, LINE = CHUNKS * 8 + 1;  // a word more: no bank conflicts
  __shared__ uint4 table[256 * 8];  // for each byte of a weight its two values, in every bank
  __shared__ float parts[BUFFERS][WARPS][ROWS][16];
  @SHARED@
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, row = lane >> 2, col = lane & 3;
  unsigned int block = blockIdx.x, outputs = outputs0, blocks = blocks0;
  u16* output = output0;
  @CHOSEN@
  const int tiles = (outputs + 15) / 16;
  @HALVES@
  // c += a * b
  auto multiply = [&](float (&c)[4], unsigned int a0, unsigned int a1, unsigned int a2, unsigned int a3,
      unsigned int b0, unsigned int b1) {
@MULTIPLY@
  };
  auto pair_at = [&](unsigned int word, int byte) {
    return *(const unsigned int*)((const char*)table + __dp4a(word, 0x80u << (8 * byte), lane * 4u));
  };
  uint2 next[AT_ONCE][2];
  float scales[2] = {0.0f, 0.0f};
  @SCALES@
  // Lane ``col`` of a row reads the scale of that chunk of its group.
  auto load = [&](int tile, int group) {
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned int of = min(tile * 16 + half * 8 + row, (int)outputs - 1);
      const unsigned char* const from = packed + (unsigned long long)of * (K / 2) + col * 8;
      #pragma unroll
      for (int u = 0; u < AT_ONCE; ++u) {
        const int chunk = (group * AT_ONCE + u) * WARPS + warp;
        if (chunk < CHUNKS) next[u][half] = __ldcs((const uint2*)(from + chunk * 32));
      }
      const int chunk = (group * AT_ONCE + col) * WARPS + warp;
      if (col < AT_ONCE && chunk < CHUNKS) {
        const unsigned int at = of * (K >> SHIFT) + (chunk * 64 >> SHIFT);
        @READ_SCALE@
      }
    }
  };
  int tile = block;
  load(tile, 0);
  if (thread < 256) {
    const unsigned int values[8] = {@VALUES@};
    unsigned int pair = 0;
    #pragma unroll
    for (int n = 0; n < 16; ++n) {
      const unsigned int value = values[n / 2] >> (16 * (n % 2)) & 0xffffu;
      pair |= thread >> 4 == n ? value : 0u;
      pair |= (thread & 15) == n ? value << 16 : 0u;
    }
    #pragma unroll
    for (int i = 0; i < 8; ++i) table[thread * 8 + ((i + lane) & 7)] = make_uint4(pair, pair, pair, pair);
  }
  @CODES@
  let_next_kernel_begin();
  wait_for_kernel_before();
  @STAGE@
  __syncthreads();

  for (int buffer = 0; tile < tiles; tile += blocks, buffer = (buffer + 1) % BUFFERS) {
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    #pragma unroll @UNROLL@
    for (int group = 0; group < GROUPS; ++group) {
      uint2 now[AT_ONCE][2];
      float scale[2];
      #pragma unroll
      for (int half = 0; half < 2; ++half) {
        #pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) now[u][half] = next[u][half];
        scale[half] = @SCALE@;
      }
      const bool is_last = group + 1 == GROUPS;
      if (!is_last || tile + (int)blocks < tiles) load(is_last ? tile + blocks : tile, is_last ? 0 : group + 1);
      @NOW@
      #pragma unroll
      for (int u = 0; u < AT_ONCE; ++u) {
        const int chunk = (group * AT_ONCE + u) * WARPS + warp;
        if (chunk >= CHUNKS) break;
        @X@
        float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
          const unsigned int low = j < 2 ? now[u][0].x : now[u][0].y, high = j < 2 ? now[u][1].x : now[u][1].y;
          const int byte = j % 2 * 2;
          multiply(c, pair_at(low, byte), pair_at(high, byte), pair_at(low, byte + 1), pair_at(high, byte + 1),
            x[j / 2].part[byte], x[j / 2].part[byte + 1]);
        }
        const float low = __shfl_sync(0xffffffffu, scale[0], (lane & 28) + u);
        const float high = __shfl_sync(0xffffffffu, scale[1], (lane & 28) + u);
        sums[0] = __fmaf_rn(c[0], low * factor0, sums[0]);
        sums[2] = __fmaf_rn(c[2], high * factor0, sums[2]);
        if (ROWS > 1) {
          sums[1] = __fmaf_rn(c[1], low * factor1, sums[1]);
          sums[3] = __fmaf_rn(c[3], high * factor1, sums[3]);
        }
      }
    }
    if (BUFFERS == 1) __syncthreads();
    #pragma unroll
    for (int i = 0; i < 4; ++i)
      if (col * 2 + i % 2 < ROWS) parts[buffer][warp][col * 2 + i % 2][row + i / 2 * 8] = sums[i];
    __syncthreads();
    const unsigned int first = tile * 16;
    if (thread < ROWS * 16 && first + thread % 16 < outputs) {
      const int m = thread / 16, r = thread % 16;
      float value = parts[buffer][0][m][r];
      #pragma unroll
      for (int other = 1; other < WARPS; ++other) value = __fadd_rn(value, parts[buffer][other][m][r]);
      value *= @UNIT@;
      @BIAS@
      output[(unsigned long long)m * outputs + first + r] = to_@KIND@(round_@KIND@(value));
    }
  }
}
"""
