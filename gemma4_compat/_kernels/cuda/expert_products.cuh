// Products of rows with the 4-bit weights of an expert each, by the arithmetic of nf4_gemv.cuh.
// Launched by specs/expert_products.py; proved by tests/unit/kernels/test_expert_products.py.
#pragma once
#include "nf4_gemv.cuh"

// n0 rows of an expert's weight, n1 blocks of a product, n2 products of a row of the input, n3 scales of an expert that
// are numbers. Each product names its expert in `chosen`. A kernel before may have written anything here, also weights.
template <typename T, typename Values, int INPUTS, int WARPS, int SCALED, bool NESTED>
__global__ void __launch_bounds__(WARPS * 32) expert_products(
    const Word16* input, const long long* chosen, const unsigned char* packed, const float* absmax,
    const unsigned char* quantized, const float* codes, const float* offset, typename T::Stored* output,
    unsigned int n0, unsigned int n1, unsigned int n2, unsigned int n3) {
  wait_for_kernel_before();
  const unsigned int number = blockIdx.x / n1;
  const unsigned long long expert = chosen[number], row = number / n2;
  nf4_gemv<T, Values, INPUTS, 1, WARPS, SCALED, NESTED, false>(
      blockIdx.x - number * n1, input + row * (INPUTS / 8),
      {packed + expert * n0 * (INPUTS / 2), absmax + expert * n3, quantized + expert * n0 * (INPUTS / SCALED), codes,
       offset + expert, nullptr, nullptr, output + (unsigned long long)number * n0, n0, n1});
}
