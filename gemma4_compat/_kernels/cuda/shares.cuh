// Training's attention between its products: from scores to shares, and from gradients of shares to those of scores.
// A warp takes a row. It reads scores twice, and nothing in float is written but two numbers of each row.
// Launched by specs/shares.py; proved by tests/unit/kernels/test_shares.py.
#pragma once
#include "prelude.cuh"

namespace shares {
enum { THREADS = 256, WARPS = THREADS / 32, EACH = 4, TURN = 32 * EACH };
static __device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

// Rows of scores: for each row of the batch, head of the keys and window a matrix. That has one head after the other, or
// `by_query` one query after the other. Steps are those of the mask; without one, a query sees `start` keys and its own.
struct Layout {
  unsigned int rows, keys, queries, group, windows, heads, by_query, start, steps[6];
};

// What a row sees of four keys.
template <bool MASKED>
struct Mask {
  const unsigned char* shown;
  unsigned int step, seen;
  __device__ __forceinline__ Mask(const unsigned char* mask, unsigned int row, const Layout& of) {
    const unsigned int in = row % (of.queries * of.group), matrix = row / (of.queries * of.group);
    const unsigned int query = of.by_query ? in / of.group : in % of.queries;
    const unsigned int member = of.by_query ? in % of.group : in / of.queries, head = matrix / of.windows;
    shown = mask, step = of.steps[5], seen = of.keys;
    if constexpr (MASKED) {
      const unsigned int at[5] = {head / of.heads, head % of.heads, matrix % of.windows, member, query};
      #pragma unroll
      for (int k = 0; k < 5; ++k) shown += (unsigned long long)at[k] * of.steps[k];
    } else {
      seen = min(of.keys, of.start + query + 1u);
    }
  }
  __device__ __forceinline__ bool shows(unsigned int key) const {
    if constexpr (MASKED) return shown[(unsigned long long)key * step];
    else return key < seen;
  }
};

// Four scores. Those of hidden keys are the least number, those beyond the last one are -inf.
template <bool MASKED>
__device__ __forceinline__ void read(const float* row, const Mask<MASKED>& mask, unsigned int at, const Layout& of,
    float scale, float (&x)[EACH]) {
  if (of.keys % EACH == 0u) {
    const float4 four = *(const float4*)(row + at);
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
  } else {
    #pragma unroll
    for (int k = 0; k < EACH; ++k) x[k] = at + k < of.keys ? row[at + k] : 0.0f;
  }
  #pragma unroll
  for (int k = 0; k < EACH; ++k) {
    x[k] *= scale;
    if (at + k >= of.keys) x[k] = -infinity();
    else if (!mask.shows(at + k)) x[k] = Float32::lowest();
  }
}

template <typename T>
__device__ __forceinline__ void write(typename T::Stored* row, unsigned int at, unsigned int keys, const float (&x)[EACH]) {
  if (keys % EACH == 0u) {
    *(uint2*)(row + at) = {T::pair(x[0], x[1]), T::pair(x[2], x[3])};
  } else {
    #pragma unroll
    for (int k = 0; k < EACH; ++k)
      if (at + k < keys) row[at + k] = T::stored(x[k]);
  }
}

// The softmax of each row, in 16 bits, and its largest score and the sum of exponentials. Rows that see nothing are zero.
template <typename T, bool MASKED>
__global__ void __launch_bounds__(THREADS) of_scores(const float* scores, const unsigned char* mask,
    typename T::Stored* found, float2* sums, unsigned int rows, unsigned int keys, unsigned int queries,
    unsigned int group, unsigned int windows, unsigned int heads, unsigned int by_query, unsigned int start,
    unsigned int s0, unsigned int s1, unsigned int s2, unsigned int s3, unsigned int s4, unsigned int s5, float scale) {
  const Layout of = {rows, keys, queries, group, windows, heads, by_query, start, {s0, s1, s2, s3, s4, s5}};
  const unsigned int lane = threadIdx.x & 31u, number = blockIdx.x * WARPS + (threadIdx.x >> 5);
  let_next_kernel_begin();
  wait_for_kernel_before();
  if (number >= rows) return;
  const float* const row = scores + (unsigned long long)number * keys;
  const Mask<MASKED> own(mask, number, of);
  float most = -infinity(), sum = 0.0f;
  #pragma unroll 2
  for (unsigned int at = lane * EACH; at < keys; at += TURN) {
    float x[EACH];
    read<MASKED>(row, own, at, of, scale, x);
    const float larger = fmaxf(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])), most);
    sum *= expf(most - larger);
    #pragma unroll
    for (int k = 0; k < EACH; ++k) sum += expf(x[k] - larger);
    most = larger;
  }
  float whole = most;
  #pragma unroll
  for (int with = 16; with; with /= 2) whole = fmaxf(whole, __shfl_xor_sync(~0u, whole, with));
  sum *= most > -infinity() ? expf(most - whole) : 0.0f;
  #pragma unroll
  for (int with = 16; with; with /= 2) sum += __shfl_xor_sync(~0u, sum, with);
  if (whole == Float32::lowest()) sum = infinity();
  if (lane == 0u) sums[number] = {whole, sum};
  #pragma unroll 2
  for (unsigned int at = lane * EACH; at < keys; at += TURN) {
    float x[EACH];
    read<MASKED>(row, own, at, of, scale, x);
    #pragma unroll
    for (int k = 0; k < EACH; ++k) x[k] = __fdiv_rn(expf(x[k] - whole), sum);
    write<T>(found + (unsigned long long)number * keys, at, keys, x);
  }
}

// From what `of_scores` has found, gradients of shares, and for each row the sum of its shares times those: the
// gradients of products, in 16 bits.
template <typename T, bool MASKED>
__global__ void __launch_bounds__(THREADS) gradients(const float* scores, const unsigned char* mask,
    const float2* sums, const float* given, const float* totals, typename T::Stored* found, unsigned int rows,
    unsigned int keys, unsigned int queries, unsigned int group, unsigned int windows, unsigned int heads,
    unsigned int by_query, unsigned int start, unsigned int s0, unsigned int s1, unsigned int s2, unsigned int s3,
    unsigned int s4, unsigned int s5, float scale) {
  const Layout of = {rows, keys, queries, group, windows, heads, by_query, start, {s0, s1, s2, s3, s4, s5}};
  const unsigned int lane = threadIdx.x & 31u, number = blockIdx.x * WARPS + (threadIdx.x >> 5);
  let_next_kernel_begin();
  wait_for_kernel_before();
  if (number >= rows) return;
  const unsigned long long begin = (unsigned long long)number * keys;
  const Mask<MASKED> own(mask, number, of);
  const float2 sum = sums[number];
  const float total = totals[number];
  #pragma unroll 2
  for (unsigned int at = lane * EACH; at < keys; at += TURN) {
    float x[EACH], y[EACH];
    read<MASKED>(scores + begin, own, at, of, scale, x);
    if (keys % EACH == 0u) {
      const float4 four = *(const float4*)(given + begin + at);
      y[0] = four.x, y[1] = four.y, y[2] = four.z, y[3] = four.w;
    } else {
      #pragma unroll
      for (int k = 0; k < EACH; ++k) y[k] = at + k < keys ? given[begin + at + k] : 0.0f;
    }
    #pragma unroll
    for (int k = 0; k < EACH; ++k) x[k] = (y[k] - total) * __fdiv_rn(expf(x[k] - sum.x), sum.y) * scale;
    write<T>(found + begin, at, keys, x);
  }
}
}  // namespace shares
