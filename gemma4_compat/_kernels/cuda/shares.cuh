// Training's attention between its products: from scores to shares, and from gradients of shares to those of scores.
// So many lanes take a row, a warp or a block. Each reads its scores once, all of them before the first is needed; of
// longer rows it reads them again.
// Launched by specs/shares.py; proved by tests/unit/kernels/test_shares.py.
#pragma once
#include "prelude.cuh"

namespace shares {
enum { EACH = 4, TURNS = 8 };
static __device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

// Rows of scores: for each row of the batch, head of the keys and window a matrix. That has one head after the other, or
// `by_query` one query after the other. Steps are those of the mask; without one, a query sees `start` keys and its own.
struct Layout {
  unsigned int rows, keys, queries, group, windows, heads, by_query, start, steps[6];
};

// What a row sees of its keys.
template <bool MASKED>
struct Mask {
  const unsigned char* shown;
  unsigned int step, seen;
  bool by_words;
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
    by_words = of.keys % EACH == 0u && step == 1u && (unsigned long long)shown % EACH == 0u;
  }
  // A byte for each of four keys that are there: not zero if it is seen.
  __device__ __forceinline__ unsigned int four(unsigned int at) const {
    unsigned int found = 0u;
    if constexpr (MASKED) {
      if (by_words) return *(const unsigned int*)(shown + at);
      #pragma unroll
      for (unsigned int k = 0; k < EACH; ++k)
        if (at + k < seen) found |= (unsigned int)shown[(unsigned long long)(at + k) * step] << (8u * k);
    } else {
      #pragma unroll
      for (unsigned int k = 0; k < EACH; ++k) found |= (at + k < seen ? 1u : 0u) << (8u * k);
    }
    return found;
  }
};

__device__ __forceinline__ void read(const float* row, unsigned int at, unsigned int keys, float (&x)[EACH]) {
  if (keys % EACH == 0u) {
    const float4 four = *(const float4*)(row + at);
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
  } else {
    #pragma unroll
    for (int k = 0; k < EACH; ++k) x[k] = at + k < keys ? row[at + k] : 0.0f;
  }
}

// Scores of hidden keys are the least number, those beyond the last key are -inf.
__device__ __forceinline__ void hide(float (&x)[EACH], unsigned int shown, unsigned int at, unsigned int keys, float scale) {
  #pragma unroll
  for (int k = 0; k < EACH; ++k) {
    x[k] *= scale;
    if (!(shown >> (8 * k) & 255u)) x[k] = at + k < keys ? Float32::lowest() : -infinity();
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

// The sum or the maximum over all lanes of a row, for each of them.
template <int LANES, bool SUM>
__device__ __forceinline__ float over_lanes(float x) {
  #pragma unroll
  for (int with = 16; with; with /= 2) {
    const float other = __shfl_xor_sync(~0u, x, with);
    x = SUM ? x + other : fmaxf(x, other);
  }
  if constexpr (LANES > 32) {
    __shared__ float of_warps[LANES / 32];
    if ((threadIdx.x & 31u) == 0u) of_warps[threadIdx.x >> 5] = x;
    __syncthreads();
    x = of_warps[0];
    #pragma unroll
    for (int warp = 1; warp < LANES / 32; ++warp) x = SUM ? x + of_warps[warp] : fmaxf(x, of_warps[warp]);
    __syncthreads();
  }
  return x;
}

template <int LANES>
struct Place {
  enum { THREADS = LANES > 256 ? LANES : 256 };
  unsigned int row, first;
  __device__ __forceinline__ Place()
      : row(blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES), first(threadIdx.x % LANES * EACH) {}
};

// The softmax of each row, in 16 bits; and its largest score, and what exponentials are multiplied by. Rows that see
// nothing are zero. LONG: more keys than lanes hold.
template <typename T, bool MASKED, int LANES, bool LONG>
__global__ void __launch_bounds__(Place<LANES>::THREADS) of_scores(const float* scores, const unsigned char* mask,
    typename T::Stored* found, float2* sums, unsigned int rows, unsigned int keys, unsigned int queries,
    unsigned int group, unsigned int windows, unsigned int heads, unsigned int by_query, unsigned int start,
    unsigned int s0, unsigned int s1, unsigned int s2, unsigned int s3, unsigned int s4, unsigned int s5, float scale) {
  constexpr unsigned int TURN = LANES * EACH, AT_ONCE = TURN * TURNS;
  const Layout of = {rows, keys, queries, group, windows, heads, by_query, start, {s0, s1, s2, s3, s4, s5}};
  const Place<LANES> place;
  let_next_kernel_begin();
  wait_for_kernel_before();
  if (place.row >= rows) return;
  const float* const row = scores + (unsigned long long)place.row * keys;
  typename T::Stored* const to = found + (unsigned long long)place.row * keys;
  const Mask<MASKED> own(mask, place.row, of);
  float x[TURNS][EACH];
  unsigned int shown[TURNS];
  auto load = [&](unsigned int begin) {
    #pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
      const unsigned int at = begin + turn * TURN;
      if (at < keys) read(row, at, keys, x[turn]), shown[turn] = own.four(at);
    }
    #pragma unroll
    for (int turn = 0; turn < TURNS; ++turn)
      if (begin + turn * TURN < keys) hide(x[turn], shown[turn], begin + turn * TURN, keys, scale);
  };
  float most = -infinity(), sum = 0.0f;
  for (unsigned int begin = place.first; begin < (LONG ? keys : 1u + place.first); begin += AT_ONCE) {
    load(begin);
    #pragma unroll
    for (int turn = 0; turn < TURNS; ++turn)
      if (begin + turn * TURN < keys)
        most = fmaxf(most, fmaxf(fmaxf(x[turn][0], x[turn][1]), fmaxf(x[turn][2], x[turn][3])));
  }
  most = over_lanes<LANES, false>(most);
  for (unsigned int begin = place.first; begin < (LONG ? keys : 1u + place.first); begin += AT_ONCE) {
    if (LONG) load(begin);
    #pragma unroll
    for (int turn = 0; turn < TURNS; ++turn)
      if (begin + turn * TURN < keys)
        #pragma unroll
        for (int k = 0; k < EACH; ++k) x[turn][k] = expf(x[turn][k] - most), sum += x[turn][k];
  }
  sum = over_lanes<LANES, true>(sum);
  const float factor = most == Float32::lowest() ? 0.0f : __fdiv_rn(1.0f, sum);
  if (place.first == 0u) sums[place.row] = {most, factor};
  for (unsigned int begin = place.first; begin < (LONG ? keys : 1u + place.first); begin += AT_ONCE) {
    if (LONG) load(begin);
    #pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
      if (begin + turn * TURN >= keys) continue;
      #pragma unroll
      for (int k = 0; k < EACH; ++k) x[turn][k] = (LONG ? expf(x[turn][k] - most) : x[turn][k]) * factor;
      write<T>(to, begin + turn * TURN, keys, x[turn]);
    }
  }
}

// From what `of_scores` has found, gradients of shares, and for each row the sum of its shares times those: the
// gradients of products, in 16 bits.
template <typename T, bool MASKED, int LANES>
__global__ void __launch_bounds__(Place<LANES>::THREADS) gradients(const float* scores, const unsigned char* mask,
    const float2* sums, const float* given, const float* totals, typename T::Stored* found, unsigned int rows,
    unsigned int keys, unsigned int queries, unsigned int group, unsigned int windows, unsigned int heads,
    unsigned int by_query, unsigned int start, unsigned int s0, unsigned int s1, unsigned int s2, unsigned int s3,
    unsigned int s4, unsigned int s5, float scale) {
  const Layout of = {rows, keys, queries, group, windows, heads, by_query, start, {s0, s1, s2, s3, s4, s5}};
  const Place<LANES> place;
  let_next_kernel_begin();
  wait_for_kernel_before();
  if (place.row >= rows) return;
  const unsigned long long begin = (unsigned long long)place.row * keys;
  const Mask<MASKED> own(mask, place.row, of);
  const float2 sum = sums[place.row];
  const float total = totals[place.row];
  #pragma unroll 4
  for (unsigned int at = place.first; at < keys; at += LANES * EACH) {
    float x[EACH], y[EACH];
    read(scores + begin, at, keys, x);
    read(given + begin, at, keys, y);
    hide(x, own.four(at), at, keys, scale);
    #pragma unroll
    for (int k = 0; k < EACH; ++k) x[k] = (y[k] - total) * (expf(x[k] - sum.x) * sum.y) * scale;
    write<T>(found + begin, at, keys, x);
  }
}
}  // namespace shares
