// Products of up to eight rows with 4-bit weights by tensor cores, for one or more weights in one launch.
//
// A warp multiplies 16 rows of the weight (a tile) by up to eight rows of the input, 64 inputs (a chunk) at a time.
// Tensor cores take inputs in any order that is the same for both factors, so each lane hands over what it reads. The
// warps of a block take the chunks in turns, and their sums are added up at the end.
// Launched by specs/nf4_gemv.py; proved by tests/unit/kernels/test_nf4_gemv.py and test_packed_integers.py.
#pragma once
#include "four_bit.cuh"
#include "tensor_cores.cuh"

namespace gemv {
enum { SHARED = 47 << 10 };  // bytes of a block

// For each byte of a weight its two values, in every bank. Here, it comes first in shared memory, whatever shares a
// launch: then the compiler adds no address to what is looked up.
__device__ __forceinline__ uint4 (&table_of_pairs())[256 * 8] {
  __shared__ uint4 table[256 * 8];
  return table;
}

// One of 256 threads fills its line.
template <typename Values>
__device__ __forceinline__ void fill(uint4 (&table)[256 * 8], int thread, int lane) {
  unsigned int pair = 0;
  #pragma unroll
  for (int n = 0; n < 16; ++n) {
    const unsigned int value = Values::pair(n / 2) >> (16 * (n % 2)) & 0xffffu;
    pair |= (thread >> Values::FIRST & 15) == n ? value : 0u;
    pair |= (thread >> (4 - Values::FIRST) & 15) == n ? value << 16 : 0u;
  }
  #pragma unroll
  for (int i = 0; i < 8; ++i) table[thread * 8 + ((i + lane) & 7)] = make_uint4(pair, pair, pair, pair);
}

// What a lane hands over of a chunk in which SCALED inputs have a scale: 16 weights in a row and two words of the input,
// or, if half a chunk has a scale of its own, eight of each half. Half the multiplications are of one half then.
template <int SCALED>
__device__ __forceinline__ uint2 weights_of(const unsigned char* chunk, int col) {
  if constexpr (SCALED >= 64) return __ldcs((const uint2*)(chunk + col * 8));
  const unsigned int* const words = (const unsigned int*)chunk + col;
  return make_uint2(__ldcs(words), __ldcs(words + 4));
}
template <int SCALED>
__device__ __forceinline__ int word_of(int col, int i) { return SCALED >= 64 ? col * 2 + i : col + i * 4; }

// The scales of a chunk as they are in memory, which become numbers where they are used.
template <typename Scale, int SCALED>
struct Scales {
  enum { COUNT = SCALED >= 64 ? 1 : 2 };
  typename Scale::Stored stored[COUNT];
  __device__ __forceinline__ void read(const typename Scale::Stored* at) {
    #pragma unroll
    for (int i = 0; i < COUNT; ++i) stored[i] = __ldg(at + i);
  }
  __device__ __forceinline__ float number(int i) const { return Scale::load(stored[i]); }
};

// Turns numbers into float16, and returns what these are to be multiplied by. float16 has less range than bfloat16: the
// largest number of a chunk, which so many lanes have together, becomes 2 ** 14 to 2 ** 15, which the factor takes
// back. What float16 cannot hold then is 2 ** -38 of it.
template <typename T>
__device__ __forceinline__ float halves(Word16* words, int count, int lanes) {
  if constexpr (Same<T, Float16>::value) return 1.0f;
  float largest = 0.0f;
  #pragma unroll
  for (int i = 0; i < count * 4; ++i) {
    const unsigned int pair = words[i / 4].part[i % 4];
    largest = fmaxf(largest, fmaxf(fabsf(__uint_as_float(pair << 16)), fabsf(__uint_as_float(pair & 0xffff0000u))));
  }
  #pragma unroll
  for (int by = 1; by < lanes; by *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, by));
  const int exponent = min(268 - (int)(__float_as_uint(largest) >> 23), 253);
  const float up = __uint_as_float((unsigned int)exponent << 23);
  #pragma unroll
  for (int i = 0; i < count * 4; ++i) {
    const unsigned int pair = words[i / 4].part[i % 4];
    words[i / 4].part[i % 4] = pair_f16(__uint_as_float(pair << 16) * up, __uint_as_float(pair & 0xffff0000u) * up);
  }
  return __uint_as_float((unsigned int)(254 - exponent) << 23);
}
}  // namespace gemv

// Inputs in INPUTS columns and ROWS rows; SCALED weights have a scale: 32 or a multiple of 64.
template <typename T, typename Values, int INPUTS, int ROWS, int WARPS, int SCALED, bool NESTED, bool BIAS>
__device__ __forceinline__ void nf4_gemv(
    unsigned int block, const Word16* input, const FourBit<T, typename Values::template Scale<T>>& own) {
  using Scales = gemv::Scales<typename Values::template Scale<T>, SCALED>;
  constexpr int COUNT = Scales::COUNT;  // of a chunk
  constexpr int K = INPUTS, CHUNKS = K / 64, OF_A_WARP = (CHUNKS + WARPS - 1) / WARPS;
  constexpr int LINE = CHUNKS * 8 + 1;  // a word more: no bank conflicts
  constexpr int BUFFERS = ROWS <= 2 ? 2 : 1;
  // The whole input is in shared memory, or every warp reads what it needs.
  constexpr int TAKEN = (32 << 10) + 1024 * NESTED + BUFFERS * WARPS * ROWS * 16 * 4;
  constexpr bool STAGED = TAKEN + ROWS * (CHUNKS * (64 * 2 + 4) + 16) <= gemv::SHARED;
  // Chunks of a warp, as many at once as there are registers for.
  constexpr int GROUPS = (OF_A_WARP + (STAGED ? 3 : 2)) / (STAGED ? 4 : 3), AT_ONCE = (OF_A_WARP + GROUPS - 1) / GROUPS;
  uint4 (&table)[256 * 8] = gemv::table_of_pairs();
  __shared__ float parts[BUFFERS][WARPS][ROWS][16];
  __shared__ Word16 given[STAGED ? ROWS * LINE : 1];
  __shared__ float factors[STAGED ? CHUNKS * ROWS : 1];
  __shared__ float known[NESTED ? 256 : 1];
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, row = lane >> 2, col = lane & 3;
  const int tiles = (own.outputs + 15) / 16;
  auto pair_at = [&](unsigned int word, int byte) {
    return *(const unsigned int*)((const char*)table + __dp4a(word, 0x80u << (8 * byte), lane * 4u));
  };
  uint2 next[AT_ONCE][2];
  Scales scales[2] = {};
  unsigned char quantized_scales[2] = {0, 0};
  // Lane `col` of a row reads the scale of that chunk of its group.
  auto load = [&](int tile, int group) {
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned int of = min(tile * 16 + half * 8 + row, (int)own.outputs - 1);
      const unsigned char* const from = own.packed + (unsigned long long)of * (K / 2);
      #pragma unroll
      for (int u = 0; u < AT_ONCE; ++u) {
        const int chunk = (group * AT_ONCE + u) * WARPS + warp;
        if (chunk < CHUNKS) next[u][half] = gemv::weights_of<SCALED>(from + chunk * 32, col);
      }
      const int chunk = (group * AT_ONCE + col) * WARPS + warp;
      if (col < AT_ONCE && chunk < CHUNKS) {
        const unsigned int at = of * (K / SCALED) + chunk * 64 / SCALED;
        if constexpr (NESTED) {
          scales[half].read(own.absmax + (at >> 8));
          quantized_scales[half] = __ldg(own.quantized + at);
        } else {
          scales[half].read(own.absmax + at);
        }
      }
    }
  };
  int tile = block;
  load(tile, 0);
  if (thread < 256) gemv::fill<Values>(table, thread, lane);
  float shift;
  if constexpr (NESTED) {
    if (thread < 256) known[thread] = __ldg(own.codes + thread);
    shift = __ldg(own.offset);
  }
  let_next_kernel_begin();
  wait_for_kernel_before();
  Word16 ahead[AT_ONCE][2];
  auto read = [&](int group) {
    #pragma unroll
    for (int i = 0; i < AT_ONCE * 2; ++i) {
      const int chunk = (group * AT_ONCE + i / 2) * WARPS + warp;
      const int word = chunk * 8 + gemv::word_of<SCALED>(col, i % 2);
      if (chunk < CHUNKS) ahead[i / 2][i % 2] = input[min(row, ROWS - 1) * (K / 8) + word];
    }
  };
  if constexpr (STAGED) {
    constexpr int WORDS = ROWS * CHUNKS * 8;
    for (int w = thread; w < (WORDS + 31) / 32 * 32; w += WARPS * 32) {  // whole warps
      const int m = w / (CHUNKS * 8), k = w % (CHUNKS * 8);
      Word16 word = input[min(w, WORDS - 1)];
      const float factor = gemv::halves<T>(&word, 1, 8);
      if (w < WORDS) given[m * LINE + k] = word;
      if (w < WORDS && k % 8 == 0) factors[k / 8 * ROWS + m] = factor;
    }
  } else {
    read(0);
  }
  __syncthreads();

  for (int buffer = 0; tile < tiles; tile += own.blocks, buffer = (buffer + 1) % BUFFERS) {
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    #pragma unroll (STAGED && GROUPS < 3 ? GROUPS : 1)
    for (int group = 0; group < GROUPS; ++group) {
      uint2 now[AT_ONCE][2];
      float scale[2][COUNT];
      #pragma unroll
      for (int half = 0; half < 2; ++half) {
        #pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) now[u][half] = next[u][half];
        #pragma unroll
        for (int i = 0; i < COUNT; ++i) {
          scale[half][i] = scales[half].number(i);
          if constexpr (NESTED) scale[half][i] = fma_flushed(known[quantized_scales[half]], scale[half][i], shift);
        }
      }
      const bool is_last = group + 1 == GROUPS;
      if (!is_last || tile + (int)own.blocks < tiles) load(is_last ? tile + own.blocks : tile, is_last ? 0 : group + 1);
      Word16 here[AT_ONCE][2];
      if constexpr (!STAGED) {
        #pragma unroll
        for (int i = 0; i < AT_ONCE * 2; ++i) here[i / 2][i % 2] = ahead[i / 2][i % 2];
        read(is_last ? 0 : group + 1);
      }
      #pragma unroll
      for (int u = 0; u < AT_ONCE; ++u) {
        const int chunk = (group * AT_ONCE + u) * WARPS + warp;
        if (chunk >= CHUNKS) break;
        Word16 (&x)[2] = here[u];
        float factor0, factor1;
        if constexpr (STAGED) {
          const Word16* const at = given + min(row, ROWS - 1) * LINE + chunk * 8;
          x[0] = at[gemv::word_of<SCALED>(col, 0)];
          x[1] = at[gemv::word_of<SCALED>(col, 1)];
          factor0 = factors[chunk * ROWS + min(col * 2, ROWS - 1)];
          factor1 = factors[chunk * ROWS + min(col * 2 + 1, ROWS - 1)];
        } else {
          const float factor = gemv::halves<T>(x, 2, 4);
          factor0 = ROWS > 1 ? __shfl_sync(0xffffffffu, factor, col * 8) : factor;
          factor1 = ROWS > 1 ? __shfl_sync(0xffffffffu, factor, col * 8 + 4) : factor;
        }
        #pragma unroll
        for (int i = 0; i < COUNT; ++i) {
          float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
          #pragma unroll
          for (int j = i * 4 / COUNT; j < (i + 1) * 4 / COUNT; ++j) {
            const unsigned int low = j < 2 ? now[u][0].x : now[u][0].y, high = j < 2 ? now[u][1].x : now[u][1].y;
            const int byte = j % 2 * 2;
            multiply<Float16>(c, pair_at(low, byte), pair_at(high, byte), pair_at(low, byte + 1),
                pair_at(high, byte + 1), x[j / 2].part[byte], x[j / 2].part[byte + 1]);
          }
          const float low = __shfl_sync(0xffffffffu, scale[0][i], (lane & 28) + u);
          const float high = __shfl_sync(0xffffffffu, scale[1][i], (lane & 28) + u);
          sums[0] = __fmaf_rn(c[0], low * factor0, sums[0]);
          sums[2] = __fmaf_rn(c[2], high * factor0, sums[2]);
          if (ROWS > 1) {
            sums[1] = __fmaf_rn(c[1], low * factor1, sums[1]);
            sums[3] = __fmaf_rn(c[3], high * factor1, sums[3]);
          }
        }
      }
    }
    if (BUFFERS == 1) __syncthreads();
    #pragma unroll
    for (int i = 0; i < 4; ++i)
      if (col * 2 + i % 2 < ROWS) parts[buffer][warp][col * 2 + i % 2][row + i / 2 * 8] = sums[i];
    __syncthreads();
    const unsigned int first = tile * 16;
    if (thread < ROWS * 16 && first + thread % 16 < own.outputs) {
      const int m = thread / 16, r = thread % 16;
      float value = parts[buffer][0][m][r];
      #pragma unroll
      for (int other = 1; other < WARPS; ++other) value = __fadd_rn(value, parts[buffer][other][m][r]);
      value *= Values::unit();
      if constexpr (BIAS) value = __fadd_rn(value, T::load(own.bias[first + r]));
      own.output[(unsigned long long)m * own.outputs + first + r] = T::stored(value);
    }
  }
}
