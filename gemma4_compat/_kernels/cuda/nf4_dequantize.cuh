// A 4-bit weight, dequantized with bitsandbytes' bits: `code * scale` in float, rounded once; a nested scale is
// `code * scale + offset`. As in bitsandbytes' kernels, products that are subnormal are zero; PyTorch adds the offset.
// Integers are unpacked with PyTorch's bits.
// Launched by specs/nf4_dequantize.py; proved by tests/unit/kernels/test_dequantizing.py and test_packed_integers.py.
#pragma once

namespace dequantizing {
enum { THREADS = 256 };  // of a block: as many as a code of nested scales has values
enum { WORDS = 4 };      // of a thread; a word has eight values

// bitsandbytes packs the first of two values in the high half of a byte.
template <typename T>
__device__ __forceinline__ unsigned int part(unsigned int word, int, int l, const float* values, float scale) {
  const unsigned int byte = word >> (l * 8);
  const float first_value = multiply_flushed(values[(byte >> 4) & 15u], scale);
  const float second_value = multiply_flushed(values[byte & 15u], scale);
  return T::pair(first_value, second_value);
}
template <>
__device__ __forceinline__ unsigned int part<Float32>(
    unsigned int word, int k, int l, const float* values, float scale) {
  const unsigned int byte = word >> (k * 16 + (l / 2) * 8);
  const float first_value = multiply_flushed(values[(byte >> 4) & 15u], scale);
  const float second_value = multiply_flushed(values[byte & 15u], scale);
  return __float_as_uint(l % 2 ? second_value : first_value);
}

// compressed-tensors packs the first of eight integers in the lowest bits, with 8 added.
__device__ __forceinline__ float integer(unsigned int word, int i) { return (float)((int)(word >> i * 4 & 15u) - 8); }
}  // namespace dequantizing

// Shifts: n1 from words to scales, n2 from words to nested scales. n0 words. Scales that are bytes are nested.
template <typename T, typename Scale>
__global__ void __launch_bounds__(dequantizing::THREADS) dequantized(const unsigned int* __restrict__ packed,
    const Scale* __restrict__ absmax, const float* __restrict__ nested, const float* __restrict__ codes,
    const float* __restrict__ offset, const float* __restrict__ code, Word16* __restrict__ out, unsigned int n0,
    unsigned int n1, unsigned int n2) {
  using dequantizing::THREADS, dequantizing::WORDS;
  constexpr int PIECES = T::IN_WORD == 4 ? 2 : 1;
  constexpr bool NESTED = sizeof(Scale) == 1;
  __shared__ float values[16], known[NESTED ? THREADS : 1];
  unsigned char quantized[WORDS];
  const unsigned int first = blockIdx.x * (THREADS * WORDS) + threadIdx.x;
  unsigned int words[WORDS];
  float scales[WORDS];
  #pragma unroll
  for (int j = 0; j < WORDS; ++j) {
    const unsigned int at = first + j * THREADS;
    if (at < n0) {
      words[j] = __ldcs(packed + at);
      if constexpr (NESTED) {
        quantized[j] = absmax[at >> n1];
        scales[j] = nested[at >> n2];
      } else {
        scales[j] = absmax[at >> n1];
      }
    }
  }
  if (threadIdx.x < 16) values[threadIdx.x] = code[threadIdx.x];
  float shift;
  if constexpr (NESTED) {
    known[threadIdx.x] = codes[threadIdx.x];
    shift = *offset;
  }
  __syncthreads();
  #pragma unroll
  for (int j = 0; j < WORDS; ++j) {
    const unsigned int at = first + j * THREADS;
    if (at < n0) {
      if constexpr (NESTED) scales[j] = __fadd_rn(multiply_flushed(known[quantized[j]], scales[j]), shift);
      #pragma unroll
      for (int k = 0; k < PIECES; ++k) {
        Word16 piece;
        #pragma unroll
        for (int l = 0; l < 4; ++l) piece.part[l] = dequantizing::part<T>(words[j], k, l, values, scales[j]);
        out[(unsigned long long)at * PIECES + k] = piece;
      }
    }
  }
}

// n0 words; a scale is for n1 of them.
template <typename T>
__global__ void __launch_bounds__(dequantizing::THREADS) unpacked(const unsigned int* __restrict__ packed,
    const typename T::Stored* __restrict__ scales, Word16* __restrict__ out, unsigned int n0, unsigned int n1) {
  using dequantizing::THREADS, dequantizing::WORDS, dequantizing::integer;
  constexpr int PIECES = T::IN_WORD == 4 ? 2 : 1;
  const unsigned int first = blockIdx.x * (THREADS * WORDS) + threadIdx.x;
  unsigned int words[WORDS];
  float scale[WORDS];
  #pragma unroll
  for (int j = 0; j < WORDS; ++j) {
    const unsigned int at = first + j * THREADS;
    if (at < n0) {
      words[j] = __ldcs(packed + at);
      scale[j] = T::load(scales[at / n1]);
    }
  }
  #pragma unroll
  for (int j = 0; j < WORDS; ++j) {
    const unsigned int at = first + j * THREADS;
    if (at < n0) {
      #pragma unroll
      for (int k = 0; k < PIECES; ++k) {
        Word16 piece;
        #pragma unroll
        for (int l = 0; l < 4; ++l) {
          if constexpr (PIECES == 2)
            piece.part[l] = __float_as_uint(integer(words[j], k * 4 + l) * scale[j]);
          else
            piece.part[l] = T::pair(integer(words[j], l * 2) * scale[j], integer(words[j], l * 2 + 1) * scale[j]);
        }
        out[(unsigned long long)at * PIECES + k] = piece;
      }
    }
  }
}
