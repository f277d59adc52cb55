// Cross entropy of logits, which are overwritten with its gradient. A block takes a token, and a thread four words of
// 4,096: a row is read three times, and only 16 bits are written.
// Launched by specs/cross_entropy.py; proved by tests/unit/kernels/test_cross_entropy.py.
#pragma once
#include "prelude.cuh"

namespace cross_entropy {
enum { THREADS = 1024, WARPS = THREADS / 32, EACH = 4 };

// The sum or the maximum over a block, for every thread. Sums are added in the order of cuda_utils::BlockReduce.
template <bool SUM>
__device__ __forceinline__ float over_block(float x, float (&of_warps)[WARPS]) {
  #pragma unroll
  for (unsigned int by = 16u; by; by >>= 1) {
    const float other = __shfl_down_sync(~0u, x, by);
    x = SUM ? __fadd_rn(x, other) : fmaxf(x, other);
  }
  __syncthreads();
  if ((threadIdx.x & 31u) == 0u) of_warps[threadIdx.x >> 5] = x;
  __syncthreads();
  x = of_warps[threadIdx.x & 31u];
  #pragma unroll
  for (unsigned int by = 16u; by; by >>= 1) {
    const float other = __shfl_down_sync(~0u, x, by);
    x = SUM ? __fadd_rn(x, other) : fmaxf(x, other);
  }
  return __shfl_sync(~0u, x, 0);
}

template <typename T>
__device__ __forceinline__ void read(const typename T::Stored* at, float (&x)[EACH]) {
  const uint2 words = *(const uint2*)at;
  #pragma unroll
  for (int k = 0; k < EACH; ++k) x[k] = T::load((u16)((k < 2 ? words.x : words.y) >> (k % 2 * 16)));
}

template <typename T>
__device__ __forceinline__ void write(typename T::Stored* at, const float (&x)[EACH]) {
  *(uint2*)at = {T::pair(x[0], x[1]), T::pair(x[2], x[3])};
}

// The soft cap rounds where the model does: what tanh gives is kept, a logit is that times the cap.
template <typename T>
__device__ __forceinline__ float capped(float x, float inverse) { return T::rounded(tanhf(T::rounded(x * inverse))); }

template <typename T, bool CAPPED>
__device__ __forceinline__ float logit(float x, float cap) { return CAPPED ? T::rounded(x * cap) : x; }

// `chosen`: the logit of each token's next word, before the cap.
template <typename T, bool CAPPED, bool GRADIENT>
__global__ void __launch_bounds__(THREADS) of_logits(const long long* targets, const typename T::Stored* chosen,
    typename T::Stored* logits, float* losses, unsigned int words, float cap) {
  __shared__ float of_warps[WARPS];
  typename T::Stored* const row = logits + (unsigned long long)blockIdx.x * words;
  const unsigned int begin = threadIdx.x * EACH;
  const float inverse = CAPPED ? __fdiv_rn(1.0f, cap) : 0.0f;
  let_next_kernel_begin();
  wait_for_kernel_before();
  float most = __uint_as_float(0xff800000u);
  #pragma unroll 4
  for (unsigned int at = begin; at < words; at += THREADS * EACH) {
    float x[EACH];
    read<T>(row + at, x);
    #pragma unroll
    for (int k = 0; k < EACH; ++k) {
      if constexpr (CAPPED) x[k] = capped<T>(x[k], inverse);
      most = fmaxf(most, logit<T, CAPPED>(x[k], cap));
    }
    if constexpr (CAPPED) write<T>(row + at, x);
  }
  most = over_block<false>(most, of_warps);
  float sum = 0.0f;
  #pragma unroll 4
  for (unsigned int at = begin; at < words; at += THREADS * EACH) {
    float x[EACH];
    read<T>(row + at, x);
    #pragma unroll
    for (int k = 0; k < EACH; ++k) sum = __fadd_rn(sum, expf(logit<T, CAPPED>(x[k], cap) - most));
  }
  const float whole = most + logf(over_block<true>(sum, of_warps));
  if (threadIdx.x == 0u) {
    float own = T::load(chosen[blockIdx.x]);
    if constexpr (CAPPED) own = capped<T>(own, inverse);
    losses[blockIdx.x] = -(logit<T, CAPPED>(own, cap) - whole);
  }
  if constexpr (GRADIENT) {
    const unsigned int target = (unsigned int)targets[blockIdx.x];
    #pragma unroll 4
    for (unsigned int at = begin; at < words; at += THREADS * EACH) {
      float x[EACH];
      read<T>(row + at, x);
      #pragma unroll
      for (int k = 0; k < EACH; ++k) {
        float found = expf(logit<T, CAPPED>(x[k], cap) - whole);
        if (at + k == target) found -= 1.0f;
        if constexpr (CAPPED) {
          const float slope = T::rounded(1.0f - T::rounded(x[k] * x[k]));
          found = T::rounded(T::rounded(T::rounded(found) * cap) * slope) * inverse;
        }
        x[k] = found;
      }
      write<T>(row + at, x);
    }
  }
}
}  // namespace cross_entropy
