// A 4-bit weight of bitsandbytes or compressed-tensors, as kernels of products read it. What a format does not have is
// null.
#pragma once

template <typename T, typename Scale = Float32>
struct FourBit {
  const unsigned char* packed;     // two weights in a byte
  const typename Scale::Stored* absmax;  // scales; of the scales, if these are quantized
  const unsigned char* quantized;  // scales as numbers of `codes`, before `offset` is added
  const float *codes, *offset;
  const float* values;             // of the 16 numbers; only gemv_4bit is given them
  const typename T::Stored* bias;
  typename T::Stored* output;
  unsigned int outputs, blocks;
};

// The 16 values of a type (csrc/gemm_4bit_common.cuh of bitsandbytes 0.50.2). Pairs of them are multiplied by a factor
// and rounded to float16; `unit` takes the factor back. NF4: of four million factors between 1 and 2, this one gives
// the least errors, 4.5e-5 (root mean square) and 1.5e-9 (mean). Values that are rounded after they were multiplied by
// scales have 8.7e-4 in bfloat16 and 1.1e-4 in float16 (root mean square). FP4 has no error.
// FIRST: where a byte has the first of its two weights. Scale: the dtype of scales, where T is that of the result.
struct OfBitsandbytes {
  enum { FIRST = 4 };
  template <typename T> using Scale = Float32;
};
struct Nf4 : OfBitsandbytes {  // 1.9247651100158691
  static __device__ __forceinline__ float value(int n) {
    const float values[16] = {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
      -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f,
      0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f,
      0.7229568362236023f, 1.0f};
    return values[n];
  }
  static __device__ __forceinline__ unsigned int pair(int n) {
    const unsigned int pairs[8] = {0xbd5cbfb3u, 0xba15bc0bu, 0xb5b1b861u, 0x0000b19cu, 0x34f530e7u, 0x39343794u,
      0x3c553ac9u, 0x3fb33d91u};
    return pairs[n];
  }
  static __device__ __forceinline__ float unit() { return 0.519543914629539f; }
};
struct Fp4 : OfBitsandbytes {  // 192
  static __device__ __forceinline__ float value(int n) {
    const float values[16] = {0.0f, 0.005208333333f, 0.66666667f, 1.0f, 0.33333333f, 0.5f, 0.16666667f, 0.25f, -0.0f,
      -0.005208333333f, -0.66666667f, -1.0f, -0.33333333f, -0.5f, -0.16666667f, -0.25f};
    return values[n];
  }
  static __device__ __forceinline__ unsigned int pair(int n) {
    const unsigned int pairs[8] = {0x3c000000u, 0x5a005800u, 0x56005400u, 0x52005000u, 0xbc008000u, 0xda00d800u,
      0xd600d400u, 0xd200d000u};
    return pairs[n];
  }
  static __device__ __forceinline__ float unit() { return 0.005208333333333333f; }
};
// Integers of compressed-tensors, with 8 added; float16 has no error.
struct Int4 {
  enum { FIRST = 0 };
  template <typename T> using Scale = T;
  static __device__ __forceinline__ unsigned int pair(int n) {
    const unsigned int pairs[8] = {0xc700c800u, 0xc500c600u, 0xc200c400u, 0xbc00c000u, 0x3c000000u, 0x42004000u,
      0x45004400u, 0x47004600u};
    return pairs[n];
  }
  static __device__ __forceinline__ float unit() { return 1.0f; }
};
