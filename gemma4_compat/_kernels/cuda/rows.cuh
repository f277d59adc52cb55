// Means and sums of rows in fused kernels, in the order in which PyTorch's CUDA kernel adds (ATen/native/cuda/Reduce.cuh). A
// block has a row. Called by kernels that fuse/row_writer.py writes; proved by tests/unit/kernels/test_rows.py.
#pragma once
#include "pointwise.cuh"

// Has a tensor that no kernel writes on its way, a line of 128 bytes for each thread.
template <unsigned int LINES>
__device__ __forceinline__ void fetch_lines(const void* tensor) {
  if (threadIdx.x < LINES) fetch_ahead((const char*)tensor + threadIdx.x * 128u);
}

// Adds up what the block has computed, into the four sums of each thread that PyTorch would have.
template <int COLUMNS, int THREADS, bool VECTOR>
__device__ __forceinline__ void add_up(float (&parts)[4], const Word16* words) {
  constexpr int EACH = VECTOR ? COLUMNS / 4 : COLUMNS;
  const float* numbers = (const float*)words;
  __syncthreads();
  if (threadIdx.x < THREADS) {
    #pragma unroll
    for (int turn = 0; turn < (EACH + THREADS - 1) / THREADS; ++turn) {
      const unsigned int at = threadIdx.x + turn * THREADS;
      if (at < EACH) {
        if constexpr (VECTOR) {
          const Word16 four = words[at];
          #pragma unroll
          for (int part = 0; part < 4; ++part) parts[part] = __fadd_rn(parts[part], __uint_as_float(four.part[part]));
        } else {
          parts[turn & 3] = __fadd_rn(parts[turn & 3], numbers[at]);
        }
      }
    }
  }
}

// The sum that a thread of a warp has, when halves down to a warp have been added.
template <int THREADS, int BEGIN = 0, int OFFSET = 32>
__device__ __forceinline__ float halves(const float* sums) {
  if constexpr (OFFSET == THREADS)
    return sums[BEGIN + (threadIdx.x & 31u)];
  else
    return __fadd_rn(
        halves<THREADS, BEGIN, 2 * OFFSET>(sums), halves<THREADS, BEGIN + OFFSET, 2 * OFFSET>(sums));
}

template <int OFFSET = 16>
__device__ __forceinline__ void down_the_warp(float& sum) {
  sum = __fadd_rn(sum, __shfl_down_sync(0xffffffffu, sum, OFFSET));
  if constexpr (OFFSET > 1) down_the_warp<OFFSET / 2>(sum);
}

// The sum of a row, from the four sums of each of these threads. `shared` is memory for a number of each, if they are
// more than a warp: each warp adds halves to halves for itself, without a further barrier.
template <int THREADS>
__device__ __forceinline__ float sum_of(const float (&parts)[4], float* shared) {
  float whole = __fadd_rn(__fadd_rn(__fadd_rn(parts[0], parts[1]), parts[2]), parts[3]);
  if constexpr (THREADS > 32) {
    if (threadIdx.x < THREADS) shared[threadIdx.x] = whole;
    __syncthreads();
    whole = halves<THREADS>(shared);
  }
  down_the_warp(whole);
  return __shfl_sync(0xffffffffu, whole, 0);
}
template <int COLUMNS, int THREADS>
__device__ __forceinline__ float mean_of(const float (&parts)[4], float* shared) {
  return __fmul_rn(sum_of<THREADS>(parts, shared), __fdiv_rn(1.0f, (float)COLUMNS));
}
