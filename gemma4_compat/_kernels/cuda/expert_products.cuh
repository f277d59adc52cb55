// Products of tokens with the 4-bit weights of the experts that they are sent to, read where these are. Each pair of a
// token and an expert has the arithmetic of one row in nf4_gemv.cuh.
// Launched by specs/expert_products.py; proved by tests/unit/kernels/test_expert_products.py.
#pragma once
#include "nf4_gemv.cuh"

// Grid: blocks of a pair, then pairs. `pairs` of them have the same row of the input. Weights of an expert: `outputs`
// rows; `nested` of the scales of its scales.
template <typename T, typename Values, int INPUTS, int WARPS, int SHIFT, bool NESTED>
__global__ void __launch_bounds__(WARPS * 32, 16 / WARPS) expert_products(const Word16* __restrict__ input,
    const long long* __restrict__ chosen, const unsigned char* __restrict__ packed, const float* __restrict__ absmax,
    const unsigned char* __restrict__ quantized, const float* __restrict__ codes, const float* __restrict__ offset,
    typename T::Stored* __restrict__ output, unsigned int outputs, unsigned int pairs, unsigned int nested) {
  wait_for_kernel_before();  // which may write `chosen`
  const unsigned long long expert = chosen[blockIdx.y], scales = expert * outputs * (INPUTS >> SHIFT);
  const FourBit<T> own = {packed + expert * outputs * (INPUTS / 2), absmax + (NESTED ? expert * nested : scales),
    NESTED ? quantized + scales : nullptr, codes, NESTED ? offset + expert : nullptr, nullptr, nullptr,
    output + (unsigned long long)blockIdx.y * outputs, outputs, gridDim.x};
  nf4_gemv<T, Values, INPUTS, 1, WARPS, SHIFT, NESTED, false>(blockIdx.x, input + blockIdx.y / pairs * (INPUTS / 8), own);
}
