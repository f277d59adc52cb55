// Kernels of several weights: which of them a block belongs to.
#pragma once

// The weight of this block; `block` becomes its number among the blocks of that weight.
template <int N = 1, typename Weight, int WEIGHTS>
__device__ __forceinline__ void own_weight(
    const Weight (&weights)[WEIGHTS], Weight& own, unsigned int& block, unsigned int given, unsigned int before = 0) {
  if constexpr (N < WEIGHTS) {
    before += weights[N - 1].blocks;
    if (given >= before) {
      block = given - before;
      own = weights[N];
    }
    own_weight<N + 1>(weights, own, block, given, before);
  }
}
