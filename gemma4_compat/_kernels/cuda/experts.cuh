// The 4-bit weights of the experts that a token hits, read and dequantized in the order in which the token names them,
// with bitsandbytes' bits: `code * scale` in float, rounded once; a nested scale is `code * scale + offset`.
// Launched by specs/expert_rows.py; proved by tests/unit/kernels/test_expert_rows.py.
#pragma once

namespace experts {
enum { WARP = 32, WORDS = 4 };  // words of 16 bytes, of a thread; a warp reads 2 KiB in one piece

// A word of the result holds two 16-bit values or one 32-bit value. bitsandbytes packs the first of two values in the
// high half.
template <typename T>
__device__ __forceinline__ unsigned int part(const Word16& word, int k, int l, const float* code, float scale) {
  unsigned int byte = (word.part[k] >> (l * 8)) & 255u;
  float high = __fmul_rn(code[byte >> 4], scale);
  float low = __fmul_rn(code[byte & 15u], scale);
  return (unsigned int)T::stored(high) | ((unsigned int)T::stored(low) << 16);
}
template <>
__device__ __forceinline__ unsigned int part<Float32>(
    const Word16& word, int k, int l, const float* code, float scale) {
  unsigned int byte = (word.part[k / 2] >> ((k % 2 * 2 + l / 2) * 8)) & 255u;
  float value = __fmul_rn(code[l % 2 ? byte & 15u : byte >> 4], scale);
  return __float_as_uint(value);
}

}  // namespace experts

// n0 threads, n1 words, n2 words of an expert, n3 scales of an expert; SHIFT from words to scales. Scales that are bytes
// are nested: n4 nested scales of an expert; NESTED_SHIFT from scales to those.
template <typename T, typename Scale, int SHIFT, int NESTED_SHIFT>
__global__ void expert_rows(const Word16* __restrict__ packed, const long long* __restrict__ chosen,
    const Scale* __restrict__ absmax, const float* __restrict__ nested, const float* __restrict__ offset,
    const float* __restrict__ codes, const float* __restrict__ code, Word16* __restrict__ out, unsigned int n0,
    unsigned int n1, unsigned int n2, unsigned int n3, unsigned int n4) {
  using experts::WARP, experts::WORDS;
  constexpr int PIECES = T::IN_WORD == 4 ? 8 : 4;
  unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n0) {
    unsigned int first = (i / WARP) * (WARP * WORDS) + i % WARP;
    Word16 words[WORDS];
    float scales[WORDS];
    #pragma unroll
    for (int j = 0; j < WORDS; ++j) {
      unsigned int at = first + j * WARP;
      if (at < n1) {
        unsigned int row = at / n2;
        unsigned int within = at - row * n2;
        unsigned long long expert = chosen[row];
        words[j] = packed[expert * n2 + within];
        unsigned int block = within >> SHIFT;
        if constexpr (sizeof(Scale) == 1)
          scales[j] = __fadd_rn(
              __fmul_rn(codes[absmax[expert * n3 + block]], nested[expert * n4 + (block >> NESTED_SHIFT)]),
              offset[expert]);
        else
          scales[j] = absmax[expert * n3 + block];
      }
    }
    #pragma unroll
    for (int j = 0; j < WORDS; ++j) {
      unsigned int at = first + j * WARP;
      if (at < n1) {
        #pragma unroll
        for (int k = 0; k < PIECES; ++k) {
          Word16 piece;
          #pragma unroll
          for (int l = 0; l < 4; ++l) piece.part[l] = experts::part<T>(words[j], k, l, code, scales[j]);
          out[(unsigned long long)at * PIECES + k] = piece;
        }
      }
    }
  }
}
