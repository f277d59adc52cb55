// What every kernel needs: dtypes and their roundings, 128-bit loads, waiting for the kernel before.
//
// Included by every program (_kernels/programs.py). Tests: those of each kernel, in tests/unit/kernels.
// bfloat16 is rounded as in c10::BFloat16.
#pragma once

typedef unsigned short u16;
struct alignas(16) Word16 { unsigned int part[4]; };
__device__ __forceinline__ float from_bf16(u16 bits) { return __uint_as_float(((unsigned int)bits) << 16); }
__device__ __forceinline__ float round_bf16(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return from_bf16(bits);
#else
  unsigned int bits = __float_as_uint(x);
  if (x != x) return __uint_as_float(0x7fc00000u);
  return __uint_as_float((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
#endif
}
__device__ __forceinline__ u16 to_bf16(float x) { return (u16)(__float_as_uint(x) >> 16); }
#ifndef ON_HOST
__device__ __forceinline__ float from_f16(u16 bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}
__device__ __forceinline__ u16 to_f16(float x) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
// Additions as in code that was compiled with --use_fast_math: subnormal operands and results are zero.
__device__ __forceinline__ float add_flushed(float a, float b) {
  float x;
  asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
  return x;
}
__device__ __forceinline__ float multiply_flushed(float a, float b) {
  float x;
  asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
  return x;
}
__device__ __forceinline__ float fma_flushed(float a, float b, float c) {
  float x;
  asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(x) : "f"(a), "f"(b), "f"(c));
  return x;
}
// Four signed bytes times four others, added to a sum.
__device__ __forceinline__ int add_bytes(unsigned int a, unsigned int b, int sum) {
  int x;
  asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(sum));
  return x;
}
// 16 bytes that are read once.
__device__ __forceinline__ Word16 load_once(const void* at) {
  Word16 word;
  asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];"
    : "=r"(word.part[0]), "=r"(word.part[1]), "=r"(word.part[2]), "=r"(word.part[3]) : "l"(at));
  return word;
}
// Have the line of 128 bytes with this address on its way to the cache that all SMs share.
__device__ __forceinline__ void fetch_ahead(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" :: "l"(at));
}
// Before this, a kernel that was launched early must read only what no kernel of the step writes. Only that may be
// `const __restrict__`: the compiler takes it for constant, and loads it earlier or from a cache that is not coherent.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Pairs of 16-bit numbers in one word, the first in the low half.
__device__ __forceinline__ unsigned int pair_bf16(float low, float high) {
#if __CUDA_ARCH__ >= 800
  unsigned int x;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
#else
  return (__float_as_uint(round_bf16(low)) >> 16) | __float_as_uint(round_bf16(high));
#endif
}
__device__ __forceinline__ unsigned int pair_f16(float low, float high) {
#if __CUDA_ARCH__ >= 800
  unsigned int x;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
  return x;
#else
  return (unsigned int)to_f16(low) | ((unsigned int)to_f16(high) << 16);
#endif
}
__device__ __forceinline__ unsigned int multiply_pairs_bf16(unsigned int a, unsigned int b) {
  unsigned int x;
#if __CUDA_ARCH__ >= 900
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
#elif __CUDA_ARCH__ >= 800
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(0x80008000u));
#else
  x = (__float_as_uint(round_bf16(__uint_as_float(a << 16) * __uint_as_float(b << 16))) >> 16) |
    __float_as_uint(round_bf16(__uint_as_float(a & 0xffff0000u) * __uint_as_float(b & 0xffff0000u)));
#endif
  return x;
}
__device__ __forceinline__ unsigned int multiply_pairs_f16(unsigned int a, unsigned int b) {
  unsigned int x;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
  return x;
}
#endif
__device__ __forceinline__ float round_f16(float x) { return from_f16(to_f16(x)); }

// Dtypes: what is stored, and the conversions to and from float. `lowest`: the least number.
// `of_bits`: what is stored, from the low bits of an integer. `element`: a number in a word of 16 bytes.
struct Float32 {
  using Stored = float;
  enum { IN_WORD = 4 };
  static __device__ __forceinline__ float lowest() { return -3.4028234663852886e+38f; }
  static __device__ __forceinline__ float of_bits(unsigned int bits) { return __uint_as_float(bits); }
  static __device__ __forceinline__ float load(float x) { return x; }
  static __device__ __forceinline__ float rounded(float x) { return x; }
  static __device__ __forceinline__ float stored(float x) { return x; }
  static __device__ __forceinline__ float element(const Word16& word, int e) { return __uint_as_float(word.part[e]); }
};
struct BFloat16 {
  using Stored = u16;
  enum { IN_WORD = 8 };
  static __device__ __forceinline__ float lowest() { return -3.3895313892515355e+38f; }
  static __device__ __forceinline__ u16 of_bits(unsigned int bits) { return (u16)bits; }
  static __device__ __forceinline__ float load(u16 bits) { return from_bf16(bits); }
  static __device__ __forceinline__ float rounded(float x) { return round_bf16(x); }
  static __device__ __forceinline__ u16 stored(float x) { return to_bf16(round_bf16(x)); }
  static __device__ __forceinline__ unsigned int pair(float low, float high) { return pair_bf16(low, high); }
  static __device__ __forceinline__ float element(const Word16& word, int e) {
    return from_bf16((u16)(word.part[e / 2] >> (e % 2 * 16)));
  }
};
struct Float16 {
  using Stored = u16;
  enum { IN_WORD = 8 };
  static __device__ __forceinline__ float lowest() { return -65504.0f; }
  static __device__ __forceinline__ u16 of_bits(unsigned int bits) { return (u16)bits; }
  static __device__ __forceinline__ float load(u16 bits) { return from_f16(bits); }
  static __device__ __forceinline__ float rounded(float x) { return round_f16(x); }
  static __device__ __forceinline__ u16 stored(float x) { return to_f16(round_f16(x)); }
  static __device__ __forceinline__ unsigned int pair(float low, float high) { return pair_f16(low, high); }
  static __device__ __forceinline__ float element(const Word16& word, int e) {
    return from_f16((u16)(word.part[e / 2] >> (e % 2 * 16)));
  }
};
struct Bool {
  using Stored = unsigned char;
  static __device__ __forceinline__ unsigned char of_bits(unsigned int bits) { return (unsigned char)bits; }
};

// Enumerators, for NVRTC would write a static member as a global variable.
template <typename A, typename B> struct Same { enum { value = false }; };
template <typename A> struct Same<A, A> { enum { value = true }; };

// 128-bit words, number by number. Recursion, not loops: the numbers are in registers from the beginning, and the
// compiler keeps the order in which they are written here.
// The numbers of a word.
template <typename T, int K = 0>
__device__ __forceinline__ void unpack(const Word16& word, float (&x)[T::IN_WORD]) {
  x[K] = T::element(word, K);
  if constexpr (K + 1 < T::IN_WORD) unpack<T, K + 1>(word, x);
}
// sum += x * weights, one after the other.
template <typename T, int K = 0>
__device__ __forceinline__ void multiply_add(float& sum, const float (&x)[T::IN_WORD], const Word16& weights) {
  sum = __fmaf_rn(x[K], T::element(weights, K), sum);
  if constexpr (K + 1 < T::IN_WORD) multiply_add<T, K + 1>(sum, x, weights);
}
template <typename T, int K = 0>
__device__ __forceinline__ void multiply_add(float& sum, const Word16& x, const Word16& weights) {
  sum = __fmaf_rn(T::element(x, K), T::element(weights, K), sum);
  if constexpr (K + 1 < T::IN_WORD) multiply_add<T, K + 1>(sum, x, weights);
}
