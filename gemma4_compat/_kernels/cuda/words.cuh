// Words of 16 bytes, number by number. Included by other files, whose tests prove it. Recursion, not loops: the numbers
// are in registers from the beginning, and the compiler keeps the order in which they are written here.
#pragma once

// The numbers of a word.
template <typename T, int K = 0>
__device__ __forceinline__ void unpack(const Word16& word, float (&x)[T::IN_WORD]) {
  x[K] = T::element(word, K);
  if constexpr (K + 1 < T::IN_WORD) unpack<T, K + 1>(word, x);
}
// sum += x * weights, one after the other.
template <typename T, int K = 0>
__device__ __forceinline__ void multiply_add(float& sum, const float (&x)[T::IN_WORD], const Word16& weights) {
  sum = __fmaf_rn(x[K], T::element(weights, K), sum);
  if constexpr (K + 1 < T::IN_WORD) multiply_add<T, K + 1>(sum, x, weights);
}
template <typename T, int K = 0>
__device__ __forceinline__ void multiply_add(float& sum, const Word16& x, const Word16& weights) {
  sum = __fmaf_rn(T::element(x, K), T::element(weights, K), sum);
  if constexpr (K + 1 < T::IN_WORD) multiply_add<T, K + 1>(sum, x, weights);
}
