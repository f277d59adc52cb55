// What fused kernels call: the functions of single elements that PyTorch computes in several steps, and products with
// few inputs, like LoRA's B. Called by kernels that fuse/writer.py writes; proved by tests/unit/kernels/test_fusing.py
// and test_rows.py.
#pragma once
#include "prelude.cuh"

// GeluCUDAKernelImpl's (ActivationGeluKernel.cu).
__device__ __forceinline__ float gelu_tanh(float x) {
  const float beta = 1.41421356237309504880168872420969808f * 1.12837916709551257389615890312154517f * 0.5f;
  const float kappa = 0.044715f;
  float cube = x * x * x;
  float inner = beta * (x + kappa * cube);
  return 0.5f * x * (1.0f + tanhf(inner));
}

// GeluBackwardCUDAKernelImpl's.
__device__ __forceinline__ float gelu_tanh_backward(float dy, float x) {
  const float beta = 1.41421356237309504880168872420969808f * 1.12837916709551257389615890312154517f * 0.5f;
  const float kappa = 0.044715f;
  float square = x * x;
  float cube = square * x;
  float inner = beta * (x + kappa * cube);
  float tanh_inner = tanhf(inner);
  float left = 0.5f * x;
  float right = 1.0f + tanh_inner;
  float left_derivative = 0.5f * right;
  float tanh_derivative = 1.0f - tanh_inner * tanh_inner;
  float inner_derivative = beta * (1.0f + 3.0f * kappa * square);
  float right_derivative = left * tanh_derivative * inner_derivative;
  return dy * (left_derivative + right_derivative);
}

// The sum of products over the inputs, in order.
template <typename X, typename W, int COLUMNS>
__device__ __forceinline__ float dot(const typename X::Stored* inputs, const typename W::Stored* weights) {
  float result = 0.0f;
  for (unsigned int k = 0; k < COLUMNS; ++k) result = __fmaf_rn(X::load(inputs[k]), W::load(weights[k]), result);
  return result;
}
// Likewise, with 128-bit loads.
template <typename T, int WORDS>
__device__ __forceinline__ float dot_of_words(const void* inputs, const Word16* weights) {
  float result = 0.0f;
  #pragma unroll
  for (int word = 0; word < WORDS; ++word) {
    const Word16 x = ((const Word16*)inputs)[word], w = weights[word];
    multiply_add<T>(result, x, w);
  }
  return result;
}
// Reads a row of a weight before it is needed.
template <int WORDS>
__device__ __forceinline__ void read_ahead(Word16* ahead, const void* row) {
  #pragma unroll
  for (int word = 0; word < WORDS; ++word) ahead[word] = ((const Word16*)row)[word];
}
