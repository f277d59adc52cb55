// Products of a few rows with 4-bit weights, with bitsandbytes' bits, for one or more weights in one launch.
//
// A warp of 32 threads computes a row of the weight. Thread `l` owns the inputs `1024 g + 32 l` to `+ 31` for each
// group `g`; the sums of the threads are added up at the end. If the number of inputs leaves half or a quarter of a
// last group, two or four rows share it: the threads that would idle continue the sums of the next rows.
// Launched by specs/nf4_exact.py; proved by tests/unit/kernels/test_nf4_exact.py.
#pragma once
#include "four_bit.cuh"

namespace exact {
enum { WARPS = 8 };       // of a block: as many threads as a code of nested scales has values
enum { GROUP = 1024 };    // inputs that a warp reads at once
enum { THREAD = 32 };     // of them, of one thread
enum { SHARED = 47 << 10 };  // bytes of a block for inputs; nested scales take another 1 KiB

template <typename T>
__device__ __forceinline__ unsigned int multiply_pairs(unsigned int a, unsigned int b) {
  if constexpr (Same<T, BFloat16>::value) return multiply_pairs_bf16(a, b);
  return multiply_pairs_f16(a, b);
}
template <typename T>
__device__ __forceinline__ void unpair(unsigned int pair, float& low, float& high) {
  if constexpr (Same<T, BFloat16>::value) {
    low = __uint_as_float(pair << 16), high = __uint_as_float(pair & 0xffff0000u);
  } else {
    low = from_f16((u16)(pair & 0xffffu)), high = from_f16((u16)(pair >> 16));
  }
}

// GEMM: the sums of gemm_4bit (csrc/gemm_4bit_simt.cu, bitsandbytes 0.50.2), which adds pairs first; otherwise those of
// gemv_4bit (csrc/kernels.cu, 0.49.2: kgemm_4bit_inference_naive), one after the other, where cub::WarpReduce adds
// neighbours first. 1 << SHIFT weights have a scale.
template <typename T, typename Values, int INPUTS, int ROWS, int SHIFT, bool GEMM, bool NESTED, bool BIAS>
struct Product {
  enum {
    WIDE = (int)T::IN_WORD == 4,
    LAST = INPUTS % GROUP,
    WARP_ROWS = LAST == GROUP / 2 ? 2 : LAST == GROUP / 4 ? 4 : 1,
    LANES = WARP_ROWS > 1 ? LAST / THREAD : 0,  // of a last group that rows share, of each row
    WHOLE = (INPUTS - LANES * THREAD + GROUP - 1) / GROUP,
    EVERY = WHOLE + (LANES > 0),  // groups
    SIZE = (int)sizeof(typename T::Stored),
    WORDS = THREAD * SIZE / 16,  // of a thread's inputs in a group
    // Groups of inputs that are in shared memory at once. Registers: each row of the input has sums of its own.
    FIT = SHARED / (GROUP * SIZE * ROWS),
    ROOM = ROWS > 1 && FIT > 4 ? 4 : FIT,
    PER_ROW = INPUTS * SIZE / 16,
  };
  const FourBit<T>& own;
  const Word16* input;
  Word16* given;
  float* known;
  int lane, first;
  decltype(typename T::Stored() + 0u) mine;  // one of the 16 values, kept for other lanes: a float or 32 bits
  float code, shift;
  float sums[WARP_ROWS * ROWS];

  template <int G>
  struct Group {
    enum {
      IS_SHARED = LANES > 0 && G == WHOLE,
      HAS_ALL = INPUTS - G * GROUP >= GROUP,  // lanes have inputs
      ACTIVE = (INPUTS - G * GROUP) / THREAD,
    };
  };
  template <int COUNT>
  struct Weights {  // of a step
    Word16 w[COUNT][WARP_ROWS];
    float s[COUNT][WARP_ROWS];
    unsigned char q[COUNT][WARP_ROWS];
  };

  // Packed weights and scales of these groups.
  template <int AT, int COUNT, int N = 0>
  __device__ __forceinline__ void load(Weights<COUNT>& step) const {
    constexpr int P = N / WARP_ROWS, R = N % WARP_ROWS, G = AT + P;
    if constexpr (R == 0 || !Group<G>::IS_SHARED) {
      int of, at;
      bool is_mine;
      if constexpr (Group<G>::IS_SHARED) {
        of = first + lane / LANES, at = G * GROUP + (lane % LANES) * THREAD;
        is_mine = of < (int)own.outputs;
      } else {
        of = first + R, at = G * GROUP + lane * THREAD;
        if constexpr (Group<G>::HAS_ALL)
          is_mine = of < (int)own.outputs;
        else
          is_mine = of < (int)own.outputs && lane < Group<G>::ACTIVE;
      }
      const int block = of * (INPUTS >> SHIFT) + (at >> SHIFT);
      step.w[P][R] = {{0u, 0u, 0u, 0u}};
      step.s[P][R] = 0.0f;
      if constexpr (NESTED) step.q[P][R] = 0;
      if (is_mine) {
        step.w[P][R] = load_once(own.packed + ((unsigned long long)of * INPUTS + at) / 2);
        if constexpr (NESTED) {
          step.s[P][R] = __ldg(own.absmax + (block >> 8));
          step.q[P][R] = __ldg(own.quantized + block);
        } else {
          step.s[P][R] = __ldg(own.absmax + block);
        }
      }
    }
    if constexpr (N + 1 < COUNT * WARP_ROWS) load<AT, COUNT, N + 1>(step);
  }

  // Scales in the form in which weights are multiplied by them.
  template <int AT, int COUNT, int N = 0>
  __device__ __forceinline__ void scale(Weights<COUNT>& step) const {
    constexpr int P = N / WARP_ROWS, R = N % WARP_ROWS;
    if constexpr (R == 0 || !Group<AT + P>::IS_SHARED) {
      float& s = step.s[P][R];
      if constexpr (NESTED) s = fma_flushed(known[step.q[P][R]], s, shift);
      if constexpr (!WIDE) s = __uint_as_float(T::pair(s, s));
    }
    if constexpr (N + 1 < COUNT * WARP_ROWS) scale<AT, COUNT, N + 1>(step);
  }

  // The inputs of these groups in shared memory, in the order in which lanes read them.
  template <int AT, int COUNT, int M = 0>
  __device__ __forceinline__ void stage() const {
    constexpr int BEGIN = AT * 32 * WORDS, FULL = (AT + COUNT) * 32 * WORDS, END = FULL < PER_ROW ? FULL : PER_ROW;
    for (int c = threadIdx.x; c < END - BEGIN; c += WARPS * 32)
      given[M * (COUNT * 32 * WORDS) + ((c / (32 * WORDS)) * WORDS + c % WORDS) * 32 + (c % (32 * WORDS)) / WORDS] =
          input[M * PER_ROW + BEGIN + c];
    if constexpr (M + 1 < ROWS) stage<AT, COUNT, M + 1>();
  }

  __device__ __forceinline__ auto value(const Word16& w, int part, int by) const {
    return __shfl_sync(0xffffffffu, mine, w.part[part] >> by, 16);
  }

  // Adds the products of a group, which is number P of COUNT in shared memory, to sums from this one on. The lane has
  // the inputs of another one in a group that rows share.
  template <int G, int P, int COUNT>
  __device__ __forceinline__ void add(const Word16& w, float s, int of_lane, float* to) const {
    const bool is_active = Group<G>::IS_SHARED || Group<G>::HAS_ALL || lane < Group<G>::ACTIVE;
    #pragma unroll
    for (int part = 0; part < 4; ++part) {
      Word16 a[ROWS], b[ROWS];
      #pragma unroll
      for (int m = 0; m < ROWS; ++m) {
        const int at = ((m * COUNT + P) * WORDS + part * (WIDE ? 2 : 1)) * 32 + of_lane;
        a[m] = given[at];
        if constexpr (WIDE) b[m] = given[at + 32];
      }
      if constexpr (WIDE) {
        float product[8];
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
          product[2 * j] = multiply_flushed(value(w, part, 8 * j + 4), s);
          product[2 * j + 1] = multiply_flushed(value(w, part, 8 * j), s);
        }
        #pragma unroll
        for (int m = 0; m < ROWS; ++m)
          if (is_active) {
            #pragma unroll
            for (int n = 0; n < 8; ++n) {
              // gemm_4bit takes the numbers of both words in turns, gemv_4bit in order.
              const int k = GEMM ? n % 2 * 4 + n / 2 : n;
              to[m] = fma_flushed(__uint_as_float(k < 4 ? a[m].part[k % 4] : b[m].part[k % 4]), product[k], to[m]);
            }
          }
      } else {
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
          const unsigned int even = value(w, part, 8 * j + 4), odd = value(w, part, 8 * j);
          const unsigned int scaled = multiply_pairs<T>(__byte_perm(even, odd, 0x5410), __float_as_uint(s));
          #pragma unroll
          for (int m = 0; m < ROWS; ++m) {
            float low, high;
            unpair<T>(multiply_pairs<T>(a[m].part[j], scaled), low, high);
            if (is_active)
              to[m] = GEMM ? add_flushed(to[m], add_flushed(low, high)) : add_flushed(add_flushed(to[m], low), high);
          }
        }
      }
    }
  }

  // Each lane continues the sums of the lane that would have its inputs.
  template <int G, int P, int COUNT>
  __device__ __forceinline__ void add_shared(const Weights<COUNT>& step) {
    const int from = lane % LANES, mine_of = lane / LANES;
    float continued[ROWS];
    #pragma unroll
    for (int m = 0; m < ROWS; ++m) {
      continued[m] = __shfl_sync(0xffffffffu, sums[m], from);
      #pragma unroll
      for (int row = 1; row < WARP_ROWS; ++row) {
        const float other = __shfl_sync(0xffffffffu, sums[row * ROWS + m], from);
        if (mine_of == row) continued[m] = other;
      }
    }
    add<G, P, COUNT>(step.w[P][0], step.s[P][0], from, continued);
    #pragma unroll
    for (int m = 0; m < ROWS; ++m)
      #pragma unroll
      for (int row = 0; row < WARP_ROWS; ++row) {
        const float back = __shfl_sync(0xffffffffu, continued[m], row * LANES + from);
        if (lane < LANES) sums[row * ROWS + m] = back;
      }
  }

  template <int AT, int COUNT, int N = 0>
  __device__ __forceinline__ void add_all(const Weights<COUNT>& step) {
    constexpr int P = N / WARP_ROWS, R = N % WARP_ROWS, G = AT + P;
    if constexpr (!Group<G>::IS_SHARED)
      add<G, P, COUNT>(step.w[P][R], step.s[P][R], lane, sums + R * ROWS);
    else if constexpr (R == 0)
      add_shared<G, P, COUNT>(step);
    if constexpr (N + 1 < COUNT * WARP_ROWS) add_all<AT, COUNT, N + 1>(step);
  }

  // Loads all weights and scales of the next groups, stages the inputs, and adds the products.
  template <int AT>
  __device__ __forceinline__ void steps() {
    constexpr int COUNT = EVERY - AT < ROOM ? EVERY - AT : ROOM;
    Weights<COUNT> step;
    load<AT>(step);
    if constexpr (AT == 0) {
      let_next_kernel_begin();
      wait_for_kernel_before();
    } else {
      __syncthreads();
    }
    stage<AT, COUNT>();
    if constexpr (AT == 0 && NESTED) known[threadIdx.x] = code;
    __syncthreads();
    scale<AT>(step);
    add_all<AT>(step);
    if constexpr (AT + COUNT < EVERY) steps<AT + COUNT>();
  }

  template <int N = 0>
  __device__ __forceinline__ void over_lanes() {
    #pragma unroll
    for (int turn = 0; turn < 5; ++turn)
      sums[N] = add_flushed(sums[N], __shfl_down_sync(0xffffffffu, sums[N], GEMM ? 16 >> turn : 1 << turn));
    if constexpr (N + 1 < WARP_ROWS * ROWS) over_lanes<N + 1>();
  }

  template <int N = 0>
  __device__ __forceinline__ void write() const {
    constexpr int R = N / ROWS, M = N % ROWS;
    if (first + R < (int)own.outputs) {
      float value = sums[N];
      if constexpr (BIAS)
        value = add_flushed(value, T::load(own.bias[first + R]));
      else if constexpr (GEMM)
        value = add_flushed(value, 0.0f);
      own.output[(unsigned long long)M * (int)own.outputs + first + R] = T::stored(value);
    }
    if constexpr (N + 1 < WARP_ROWS * ROWS) write<N + 1>();
  }
};
}  // namespace exact

template <typename T, typename Values, int INPUTS, int ROWS, int SHIFT, bool GEMM, bool NESTED, bool BIAS>
__device__ __forceinline__ void nf4_exact(unsigned int block, const Word16* input, const FourBit<T>& own) {
  using Product = exact::Product<T, Values, INPUTS, ROWS, SHIFT, GEMM, NESTED, BIAS>;
  constexpr int COUNT = (int)Product::EVERY < (int)Product::ROOM ? Product::EVERY : Product::ROOM;
  __shared__ Word16 given[COUNT * 32 * Product::WORDS * ROWS];
  __shared__ float known[NESTED ? exact::WARPS * 32 : 1];
  Product product = {own, input, given, known};
  product.lane = threadIdx.x & 31;
  product.first = (threadIdx.x >> 5) * Product::WARP_ROWS + block * (exact::WARPS * Product::WARP_ROWS);
  #pragma unroll
  for (int n = 0; n < Product::WARP_ROWS * ROWS; ++n) product.sums[n] = 0.0f;
  float value;
  if constexpr (GEMM) {
    value = Values::value(0);
    #pragma unroll
    for (int n = 1; n < 16; ++n)
      if ((product.lane & 15) == n) value = Values::value(n);
  } else {
    value = own.values[product.lane & 15];
  }
  product.mine = T::stored(value);
  if constexpr (NESTED) product.code = __ldg(own.codes + threadIdx.x), product.shift = __ldg(own.offset);
  product.template steps<0>();
  product.over_lanes();
  if (product.lane == 0) product.write();
}
