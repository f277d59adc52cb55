// A full sliding cache drops its first row for each new one: moves the rows of a layer in place.
//
// Launched by specs/shifting.py. Test: tests/unit/kernels/test_shifting.py.
//
// A block takes a strip of all rows of one head, PER words wide: its threads read, meet at a barrier, and write each
// word one row before. No other block reads or writes that strip. Blocks with odd numbers move values.
// A thread moves up to TIMES words between two barriers.
#pragma once
#include "prelude.cuh"

template <typename Word, unsigned int PER, int TIMES, int THREADS>
__global__ void __launch_bounds__(THREADS) shift(const Word* new_keys,
  const Word* new_values, Word* keys, Word* values, unsigned int rows, unsigned int words,
  unsigned int heads, unsigned int key_batch, unsigned int key_head, unsigned int value_batch,
  unsigned int value_head) {
  const unsigned int column = (blockIdx.x >> 1) * PER + threadIdx.x % PER, row = threadIdx.x / PER;
  const unsigned int step = blockDim.x / PER, batch = blockIdx.y / heads, head = blockIdx.y % heads;
  const bool of_values = blockIdx.x & 1u, inside = column < words;
  Word* held = (of_values ? values : keys) + (unsigned long long)blockIdx.y * rows * words + column;
  const Word* fresh = of_values ? new_values + batch * value_batch + head * value_head + column
    : new_keys + batch * key_batch + head * key_head + column;
  Word moved[TIMES];
  auto read = [&](unsigned int begin) {
    #pragma unroll
    for (int k = 0; k < TIMES; ++k) {
      const unsigned int at = begin + row + k * step;
      if (inside && at + 1u < rows) moved[k] = held[(at + 1u) * words];
    }
  };
  read(0u);  // what is read before the wait is from the step before: no kernel of this step has written it
  let_next_kernel_begin();
  wait_for_kernel_before();
  for (unsigned int begin = 0u;;) {
    __syncthreads();
    #pragma unroll
    for (int k = 0; k < TIMES; ++k) {
      const unsigned int at = begin + row + k * step;
      if (inside && at < rows) held[at * words] = at + 1u < rows ? moved[k] : *fresh;
    }
    begin += TIMES * step;
    if (begin >= rows) break;
    read(begin);
  }
}
