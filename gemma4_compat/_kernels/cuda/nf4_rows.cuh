// Products of more than eight rows with 4-bit weights. Each row has the arithmetic, and so the bits, of nf4_gemv.cuh; a
// weight is looked up once for up to 32 rows.
//
// `prepare` turns the input into float16 and its factors, in the order in which lanes hand it over, where nf4_gemv does
// that for every tile; of few inputs it takes longer than it saves. The warps of a block take the chunks of a tile in
// turns, as there.
// Launched by specs/nf4_gemv.py; proved by tests/unit/kernels/test_nf4_gemv.py and test_packed_integers.py.
#pragma once
#include "nf4_gemv.cuh"

namespace gemv {
// For eight rows and a chunk, two words of each lane; after all of them, a factor for each row. One warp for each.
template <typename T, int INPUTS, int ROWS, int SCALED, int THREADS>
__global__ void __launch_bounds__(THREADS) prepare(const Word16* input, Word16* prepared) {
  constexpr int CHUNKS = INPUTS / 64, ALL = Eights<ROWS>::ALL * CHUNKS;
  const int lane = threadIdx.x & 31, row = lane >> 2, col = lane & 3;
  const int at = blockIdx.x * (THREADS / 32) + (threadIdx.x >> 5);
  let_next_kernel_begin();
  wait_for_kernel_before();
  if (at >= ALL) return;
  Word16 words[2];
  #pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int word = at % CHUNKS * 8 + word_of<SCALED>(col, i);
    words[i] = input[min(at / CHUNKS * 8 + row, ROWS - 1) * (INPUTS / 8) + word];
  }
  const float factor = halves<T>(words, 2, 4);
  #pragma unroll
  for (int i = 0; i < 2; ++i) prepared[(at * 2 + i) * 32 + lane] = words[i];
  if (col == 0) ((float*)(prepared + ALL * 64))[at * 8 + row] = factor;
}
}  // namespace gemv

// As nf4_gemv. PREPARED: `input` is what `prepare` has written.
template <typename T, typename Values, int INPUTS, int ROWS, int WARPS, int SCALED, bool NESTED, bool BIAS, bool PREPARED>
__device__ __forceinline__ void nf4_rows(
    unsigned int block, const Word16* input, const FourBit<T, typename Values::template Scale<T>>& own) {
  using Scales = gemv::Scales<typename Values::template Scale<T>, SCALED>;
  constexpr int COUNT = Scales::COUNT;  // of a chunk
  using Eights = Eights<ROWS>;
  constexpr int K = INPUTS, CHUNKS = K / 64, OF_A_WARP = (CHUNKS + WARPS - 1) / WARPS, EACH = Eights::EACH;
  constexpr int GROUPS = (OF_A_WARP + 1) / 2, AT_ONCE = (OF_A_WARP + GROUPS - 1) / GROUPS;
  constexpr int TOGETHER = 16 / WARPS;  // eights whose sums are added up at once
  uint4 (&table)[256 * 8] = gemv::table_of_pairs();
  __shared__ float parts[WARPS][TOGETHER * 8][16];
  __shared__ float known[NESTED ? 256 : 1];
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, row = lane >> 2, col = lane & 3;
  const int tiles = (own.outputs + 15) / 16, step = own.blocks / Eights::PARTS;
  const int eight = block % Eights::PARTS * EACH;
  const float* const factors = (const float*)(input + Eights::ALL * CHUNKS * 64);
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
  int tile = block / Eights::PARTS;
  load(tile, 0);
  if (thread < 256) gemv::fill<Values>(table, thread, lane);
  float shift;
  if constexpr (NESTED) {
    if (thread < 256) known[thread] = __ldg(own.codes + thread);
    shift = __ldg(own.offset);
  }
  let_next_kernel_begin();
  wait_for_kernel_before();
  __syncthreads();

  for (; tile < tiles; tile += step) {
    float sums[EACH][4];
    #pragma unroll
    for (int i = 0; i < EACH * 4; ++i) sums[i / 4][i % 4] = 0.0f;
    #pragma unroll 1
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
      if (!is_last || tile + step < tiles) load(is_last ? tile + step : tile, is_last ? 0 : group + 1);
      #pragma unroll
      for (int u = 0; u < AT_ONCE; ++u) {
        const int chunk = (group * AT_ONCE + u) * WARPS + warp;
        if (chunk >= CHUNKS) break;
        Word16 x[EACH][2];
        float2 factor[EACH];
        #pragma unroll
        for (int t = 0; t < EACH; ++t) {
          if constexpr (PREPARED) {
            const int at = (eight + t) * CHUNKS + chunk;
            x[t][0] = input[at * 64 + lane];
            x[t][1] = input[at * 64 + 32 + lane];
            factor[t] = *(const float2*)(factors + at * 8 + col * 2);
          } else {
            const Word16* const at = input + (min((eight + t) * 8 + row, ROWS - 1) * (K / 8) + chunk * 8);
            x[t][0] = at[gemv::word_of<SCALED>(col, 0)];
            x[t][1] = at[gemv::word_of<SCALED>(col, 1)];
            const float one = gemv::halves<T>(x[t], 2, 4);
            factor[t].x = __shfl_sync(0xffffffffu, one, col * 8);
            factor[t].y = __shfl_sync(0xffffffffu, one, col * 8 + 4);
          }
        }
        #pragma unroll
        for (int i = 0; i < COUNT; ++i) {
          float c[EACH][4];
          #pragma unroll
          for (int k = 0; k < EACH * 4; ++k) c[k / 4][k % 4] = 0.0f;
          #pragma unroll
          for (int j = i * 4 / COUNT; j < (i + 1) * 4 / COUNT; ++j) {
            const unsigned int low = j < 2 ? now[u][0].x : now[u][0].y, high = j < 2 ? now[u][1].x : now[u][1].y;
            const int byte = j % 2 * 2;
            const unsigned int a0 = pair_at(low, byte), a1 = pair_at(high, byte);
            const unsigned int a2 = pair_at(low, byte + 1), a3 = pair_at(high, byte + 1);
            #pragma unroll
            for (int t = 0; t < EACH; ++t)
              multiply<Float16>(c[t], a0, a1, a2, a3, x[t][j / 2].part[byte], x[t][j / 2].part[byte + 1]);
          }
          const float low = __shfl_sync(0xffffffffu, scale[0][i], (lane & 28) + u);
          const float high = __shfl_sync(0xffffffffu, scale[1][i], (lane & 28) + u);
          #pragma unroll
          for (int t = 0; t < EACH; ++t) {
            sums[t][0] = __fmaf_rn(c[t][0], low * factor[t].x, sums[t][0]);
            sums[t][2] = __fmaf_rn(c[t][2], high * factor[t].x, sums[t][2]);
            sums[t][1] = __fmaf_rn(c[t][1], low * factor[t].y, sums[t][1]);
            sums[t][3] = __fmaf_rn(c[t][3], high * factor[t].y, sums[t][3]);
          }
        }
      }
    }
    #pragma unroll
    for (int begin = 0; begin < EACH; begin += TOGETHER) {
      __syncthreads();
      #pragma unroll
      for (int i = 0; i < TOGETHER * 4; ++i)
        if (begin + i / 4 < EACH)
          parts[warp][i / 4 * 8 + col * 2 + i % 2][row + i % 4 / 2 * 8] = sums[min(begin + i / 4, EACH - 1)][i % 4];
      __syncthreads();
      const int own_row = thread / 16, r = thread % 16, m = (eight + begin) * 8 + own_row, at = tile * 16 + r;
      if (thread < TOGETHER * 128 && begin + own_row / 8 < EACH && m < ROWS && at < (int)own.outputs) {
        float value = parts[0][own_row][r];
        #pragma unroll
        for (int other = 1; other < WARPS; ++other) value = __fadd_rn(value, parts[other][own_row][r]);
        value *= Values::unit();
        if constexpr (BIAS) value = __fadd_rn(value, T::load(own.bias[at]));
        own.output[(unsigned long long)m * own.outputs + at] = T::stored(value);
      }
    }
  }
}
