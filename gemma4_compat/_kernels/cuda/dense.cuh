// Products of a few rows with weights that are not quantized, for one or more weights in one launch. Sums are in float,
// and only the result is rounded. Launched by specs/dense.py; proved by tests/unit/kernels/test_custom.py.
#pragma once
#include "prelude.cuh"

namespace dense {
enum { THREADS = 256, WARPS = THREADS / 32 };
enum { WARP_ROWS = 4 };  // of a large weight, that a warp takes

// A block multiplies at most eight rows of the input. More of them are divided among as many blocks, next to each other
// so that they read a weight once from memory; two blocks may compute the same row.
template <int ROWS>
struct Parts {
  enum { COUNT = (ROWS + 7) / 8, EACH = (ROWS + COUNT - 1) / COUNT };
  static __device__ __forceinline__ unsigned int first(unsigned int block) {
    return COUNT == 1 ? 0u : min(block % COUNT * EACH, (unsigned int)(ROWS - EACH));
  }
};

template <typename T>
struct Weight {
  const typename T::Stored *weight, *bias;
  typename T::Stored* output;
  unsigned int outputs, blocks;
};

// Word number `at`, counted from this row of the weight.
template <typename T, int INPUTS, bool ALIGNED>
__device__ __forceinline__ Word16 word(const typename T::Stored* weight, unsigned int row, unsigned int at) {
  const typename T::Stored* const begin = weight + (unsigned long long)row * INPUTS;
  if constexpr (ALIGNED) {
    return load_once((const Word16*)begin + at);
  } else {
    union {
      typename T::Stored one[T::IN_WORD];
      Word16 word;
    } found;
    const typename T::Stored* from = begin + at * T::IN_WORD;
    #pragma unroll
    for (int k = 0; k < T::IN_WORD; ++k) found.one[k] = from[k];
    return found.word;
  }
}

// The inputs from this address on, as many as a word of the weight has.
template <typename T, typename GIVEN, bool ALIGNED>
__device__ __forceinline__ void read(const typename GIVEN::Stored* from, float (&x)[T::IN_WORD]) {
  if constexpr (ALIGNED && (int)GIVEN::IN_WORD == (int)T::IN_WORD) {
    const Word16 words = *(const Word16*)from;
    unpack<GIVEN>(words, x);
  } else {
    #pragma unroll
    for (int k = 0; k < T::IN_WORD; ++k) x[k] = GIVEN::load(from[k]);
  }
}

// The sum over a warp, for every lane.
template <int OFFSET = 16>
__device__ __forceinline__ void over_lanes(float& total) {
  total = __fadd_rn(total, __shfl_xor_sync(0xffffffffu, total, OFFSET));
  if constexpr (OFFSET > 1) over_lanes<OFFSET / 2>(total);
}

template <typename T, bool BIAS>
__device__ __forceinline__ void write(const Weight<T>& own, unsigned int m, unsigned int row, float value) {
  if constexpr (BIAS) value = __fadd_rn(value, T::load(own.bias[row]));
  own.output[(unsigned long long)m * own.outputs + row] = T::stored(value);
}

// A word of the weight times each row of the input.
template <typename T, typename GIVEN, int INPUTS, bool ALIGNED, int M = 0, int ROWS>
__device__ __forceinline__ void add(
    float (&sums)[ROWS], const typename GIVEN::Stored* input, unsigned int at, const Word16& w) {
  float x[T::IN_WORD];
  read<T, GIVEN, ALIGNED>(input + (M * INPUTS + at * T::IN_WORD), x);
  multiply_add<T>(sums[M], x, w);
  if constexpr (M + 1 < ROWS) add<T, GIVEN, INPUTS, ALIGNED, M + 1>(sums, input, at, w);
}

template <int M = 0, int ROWS>
__device__ __forceinline__ void share(float (&of_warps)[ROWS][WARPS], float (&sums)[ROWS]) {
  over_lanes(sums[M]);
  if ((threadIdx.x & 31u) == 0u) of_warps[M][threadIdx.x >> 5] = sums[M];
  if constexpr (M + 1 < ROWS) share<M + 1>(of_warps, sums);
}

// A block takes a row of the weight; each thread takes every 256th word.
template <typename T, typename GIVEN, int ALL, int INPUTS, bool BIAS, bool ALIGNED>
__device__ __forceinline__ void small(
    unsigned int block, const typename GIVEN::Stored* input, const Weight<T>& own) {
  constexpr int ROWS = Parts<ALL>::EACH;
  const unsigned int from = Parts<ALL>::first(block);
  block /= Parts<ALL>::COUNT;
  input += from * INPUTS;
  constexpr int WORDS = INPUTS / T::IN_WORD, TURNS = (WORDS + THREADS - 1) / THREADS;
  Word16 w[TURNS];
  #pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    const unsigned int at = threadIdx.x + turn * THREADS;
    if (at < WORDS) w[turn] = word<T, INPUTS, ALIGNED>(own.weight, block, at);
  }
  let_next_kernel_begin();
  wait_for_kernel_before();
  float sums[ROWS];
  #pragma unroll
  for (int m = 0; m < ROWS; ++m) sums[m] = 0.0f;
  #pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    const unsigned int at = threadIdx.x + turn * THREADS;
    if (at < WORDS) add<T, GIVEN, INPUTS, ALIGNED>(sums, input, at, w[turn]);
  }
  __shared__ float of_warps[ROWS][WARPS];
  share(of_warps, sums);
  __syncthreads();
  if (threadIdx.x < ROWS) {
    float whole = of_warps[threadIdx.x][0];
    #pragma unroll
    for (int warp = 1; warp < WARPS; ++warp) whole = __fadd_rn(whole, of_warps[threadIdx.x][warp]);
    write<T, BIAS>(own, from + threadIdx.x, block, whole);
  }
}

// A word of each of a warp's rows times each row of the input.
template <typename T, typename GIVEN, int INPUTS, bool ALIGNED, int M = 0, int ROWS>
__device__ __forceinline__ void add(float (&sums)[WARP_ROWS][ROWS], const typename GIVEN::Stored* input,
    unsigned int at, const Word16 (&w)[WARP_ROWS]) {
  float x[T::IN_WORD];
  read<T, GIVEN, ALIGNED>(input + (M * INPUTS + at * T::IN_WORD), x);
  #pragma unroll
  for (int r = 0; r < WARP_ROWS; ++r) multiply_add<T>(sums[r][M], x, w[r]);
  if constexpr (M + 1 < ROWS) add<T, GIVEN, INPUTS, ALIGNED, M + 1>(sums, input, at, w);
}

template <typename T, bool BIAS, unsigned int N = 0, int ROWS>
__device__ __forceinline__ void finish(const Weight<T>& own, unsigned int from, unsigned int first, unsigned int rows,
    float (&sums)[WARP_ROWS][ROWS]) {
  constexpr unsigned int R = N / ROWS, M = N % ROWS;
  over_lanes(sums[R][M]);
  if ((threadIdx.x & 31u) == 0u && R < rows) write<T, BIAS>(own, from + M, first + R, sums[R][M]);
  if constexpr (N + 1 < WARP_ROWS * ROWS) finish<T, BIAS, N + 1>(own, from, first, rows, sums);
}

// A warp takes four rows of the weight; each lane takes every 32nd word of each.
template <typename T, typename GIVEN, int ALL, int INPUTS, bool BIAS, bool ALIGNED>
__device__ __forceinline__ void large(
    unsigned int block, const typename GIVEN::Stored* input, const Weight<T>& own) {
  constexpr int ROWS = Parts<ALL>::EACH;
  const unsigned int from = Parts<ALL>::first(block);
  block /= Parts<ALL>::COUNT;
  input += from * INPUTS;
  constexpr int WORDS = INPUTS / T::IN_WORD, TURNS = (WORDS + 31) / 32;
  const unsigned int lane = threadIdx.x & 31u, first = (block * WARPS + (threadIdx.x >> 5)) * WARP_ROWS;
  const unsigned int rows = first < own.outputs ? min((unsigned int)WARP_ROWS, own.outputs - first) : 0u;
  float sums[WARP_ROWS][ROWS];
  #pragma unroll
  for (int r = 0; r < WARP_ROWS; ++r)
    #pragma unroll
    for (int m = 0; m < ROWS; ++m) sums[r][m] = 0.0f;
  Word16 w[WARP_ROWS];
  #pragma unroll
  for (int r = 0; r < WARP_ROWS; ++r)
    if (r < rows && lane < WORDS) w[r] = word<T, INPUTS, ALIGNED>(own.weight, first, r * WORDS + lane);
  let_next_kernel_begin();
  wait_for_kernel_before();
  #pragma unroll (TURNS < 8 ? TURNS : 8)
  for (int turn = 0; turn < TURNS; ++turn) {
    const unsigned int at = lane + turn * 32u, next = at + 32u;
    Word16 ahead[WARP_ROWS];
    #pragma unroll
    for (int r = 0; r < WARP_ROWS; ++r)
      if (r < rows && next < WORDS) ahead[r] = word<T, INPUTS, ALIGNED>(own.weight, first, r * WORDS + next);
    if (at < WORDS) add<T, GIVEN, INPUTS, ALIGNED>(sums, input, at, w);
    #pragma unroll
    for (int r = 0; r < WARP_ROWS; ++r) w[r] = ahead[r];
  }
  finish<T, BIAS>(own, from, first, rows, sums);
}
}  // namespace dense
