// Runs of numbers that lie one after another, which a thread reads and writes in words, in kernels of large results.
// Called by kernels that fuse/run_writer.py writes; proved by tests/unit/kernels/test_runs.py.
#pragma once
#include "rows.cuh"

struct alignas(8) Word8 { unsigned int part[2]; };

// Reads a run of N numbers, which is aligned to its length or to 16 bytes.
template <typename T, int N>
__device__ __forceinline__ void read_run(float (&x)[N], const typename T::Stored* at) {
  constexpr int BYTES = N * (int)sizeof(typename T::Stored);
  if constexpr (BYTES % 16 == 0) {
    #pragma unroll
    for (int number = 0; number < BYTES / 16; ++number) {
      const Word16 word = ((const Word16*)at)[number];
      #pragma unroll
      for (int e = 0; e < T::IN_WORD; ++e) x[number * T::IN_WORD + e] = T::element(word, e);
    }
  } else if constexpr (BYTES == 8) {
    const Word8 half = *(const Word8*)at;
    const Word16 word = {{half.part[0], half.part[1], 0u, 0u}};
    #pragma unroll
    for (int e = 0; e < N; ++e) x[e] = T::element(word, e);
  } else {
    #pragma unroll
    for (int e = 0; e < N; ++e) x[e] = T::load(at[e]);
  }
}

// Two numbers that are rounded already, as they are stored.
template <typename T>
__device__ __forceinline__ unsigned int packed(float low, float high) {
  if constexpr (Same<T, BFloat16>::value)
    return (__float_as_uint(low) >> 16) | (__float_as_uint(high) & 0xffff0000u);
  else
    return (unsigned int)to_f16(low) | ((unsigned int)to_f16(high) << 16);
}

// Likewise, writes them.
template <typename T, int N>
__device__ __forceinline__ void write_run(typename T::Stored* at, const float (&x)[N]) {
  constexpr int SIZE = (int)sizeof(typename T::Stored), WORDS = N * SIZE / 4;
  if constexpr (N * SIZE % 8 == 0) {
    unsigned int parts[WORDS];
    #pragma unroll
    for (int part = 0; part < WORDS; ++part) {
      if constexpr (SIZE == 4)
        parts[part] = __float_as_uint(x[part]);
      else
        parts[part] = packed<T>(x[2 * part], x[2 * part + 1]);
    }
    if constexpr (WORDS % 4 == 0) {
      #pragma unroll
      for (int number = 0; number < WORDS / 4; ++number) {
        const unsigned int* four = parts + 4 * number;
        ((Word16*)at)[number] = Word16{{four[0], four[1], four[2], four[3]}};
      }
    } else {
      *(Word8*)at = Word8{{parts[0], parts[1]}};
    }
  } else {
    #pragma unroll
    for (int e = 0; e < N; ++e) at[e] = T::stored(x[e]);
  }
}
