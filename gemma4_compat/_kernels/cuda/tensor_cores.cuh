// c += a * b by tensor cores: 16 rows of a, 8 columns of b, 16 products for each number of c, which a warp has
// together. a0 to a3, b0 and b1 are pairs of BFloat16 or Float16 numbers. Where there are no tensor cores for a
// dtype, each lane computes its four numbers. Included by files of attention, products and heads, whose tests prove it.
#pragma once
#include "prelude.cuh"

// Rows of the input by eights. Blocks that are next to each other take PARTS of them with the same rows of a weight.
template <int ROWS>
struct Eights {
  enum { SOME = (ROWS + 7) / 8, PARTS = (SOME + 3) / 4, EACH = (SOME + PARTS - 1) / PARTS, ALL = PARTS * EACH };
};

template <typename T>
__device__ __forceinline__ void multiply(float (&c)[4], unsigned int a0, unsigned int a1, unsigned int a2,
    unsigned int a3, unsigned int b0, unsigned int b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if constexpr (Same<T, Float16>::value)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
#ifdef __CUDA_ARCH__
  if constexpr (Same<T, Float16>::value) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(b0));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a2), "r"(a3), "r"(b1));
    return;
  }
#endif
  const int lane = threadIdx.x & 31, col = lane & 3;
  #pragma unroll 1
  for (int s = 0; s < 4; ++s)
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int a_lane = (lane & 28) + s, b_lane = col * 8 + i % 2 * 4 + s;
      const unsigned int a[2] = {__shfl_sync(0xffffffffu, i < 2 ? a0 : a1, a_lane),
        __shfl_sync(0xffffffffu, i < 2 ? a2 : a3, a_lane)};
      const unsigned int b[2] = {__shfl_sync(0xffffffffu, b0, b_lane), __shfl_sync(0xffffffffu, b1, b_lane)};
      #pragma unroll
      for (int k = 0; k < 2; ++k) {
        c[i] = fmaf(T::load((u16)a[k]), T::load((u16)b[k]), c[i]);
        c[i] = fmaf(T::load((u16)(a[k] >> 16)), T::load((u16)(b[k] >> 16)), c[i]);
      }
    }
#endif
}

// The same with 8-bit integers, four in each of a0 to a3, b0 and b1: 32 products for each number of c.
__device__ __forceinline__ void multiply_bytes(int (&c)[4], unsigned int a0, unsigned int a1, unsigned int a2,
    unsigned int a3, unsigned int b0, unsigned int b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};" : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 750
  const unsigned int a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  #pragma unroll
  for (int part = 0; part < 4; ++part)
    asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+r"(c[part % 2 * 2]), "+r"(c[part % 2 * 2 + 1]) : "r"(a[part]), "r"(b[part / 2]));
#else
  const int lane = threadIdx.x & 31, col = lane & 3;
  #pragma unroll 1
  for (int s = 0; s < 4; ++s)
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int a_lane = (lane & 28) + s, b_lane = col * 8 + i % 2 * 4 + s;
      const unsigned int low = __shfl_sync(0xffffffffu, i < 2 ? a0 : a1, a_lane);
      const unsigned int high = __shfl_sync(0xffffffffu, i < 2 ? a2 : a3, a_lane);
      c[i] = add_bytes(low, __shfl_sync(0xffffffffu, b0, b_lane), c[i]);
      c[i] = add_bytes(high, __shfl_sync(0xffffffffu, b1, b_lane), c[i]);
    }
#endif
}
