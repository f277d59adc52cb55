// How numbers of each dtype are stored, and their conversion to and from float. A template parameter names a dtype.
#pragma once

struct Float32 {
  using Stored = float;
  enum { EACH = 4 };  // in a word
  static __device__ __forceinline__ float load(float x) { return x; }
  static __device__ __forceinline__ float store(float x) { return x; }
  template <int K>
  static __device__ __forceinline__ float at(const Word16& word) {
    return __uint_as_float(word.part[K]);
  }
};
template <int K>
__device__ __forceinline__ u16 half_of(const Word16& word) {
  return (u16)(K % 2 ? word.part[K / 2] >> 16 : word.part[K / 2] & 0xffffu);
}
struct BFloat16 {
  using Stored = u16;
  enum { EACH = 8 };
  static __device__ __forceinline__ float load(u16 bits) { return from_bf16(bits); }
  static __device__ __forceinline__ u16 store(float x) { return to_bf16(round_bf16(x)); }
  template <int K>
  static __device__ __forceinline__ float at(const Word16& word) {
    return from_bf16(half_of<K>(word));
  }
};
struct Float16 {
  using Stored = u16;
  enum { EACH = 8 };
  static __device__ __forceinline__ float load(u16 bits) { return from_f16(bits); }
  static __device__ __forceinline__ u16 store(float x) { return to_f16(round_f16(x)); }
  template <int K>
  static __device__ __forceinline__ float at(const Word16& word) {
    return from_f16(half_of<K>(word));
  }
};

// The numbers of a word.
template <typename T, int K = 0>
__device__ __forceinline__ void unpack(const Word16& word, float (&x)[T::EACH]) {
  x[K] = T::template at<K>(word);
  if constexpr (K + 1 < T::EACH) unpack<T, K + 1>(word, x);
}
// sum += x * weights, one after the other.
template <typename T, int K = 0>
__device__ __forceinline__ void multiply_add(float& sum, const float (&x)[T::EACH], const Word16& weights) {
  sum = __fmaf_rn(x[K], T::template at<K>(weights), sum);
  if constexpr (K + 1 < T::EACH) multiply_add<T, K + 1>(sum, x, weights);
}
