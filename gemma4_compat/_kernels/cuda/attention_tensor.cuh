// Attention of 16-bit numbers by tensor cores: the same parts as `attend` in attention.cuh.
//
// Launched by specs/attention.py. Tests: tests/unit/kernels/test_attention.py, against attention in float64, and
// test_kernels_compile.py for the registers that a tile takes.
//
// Products of 16-bit numbers are exact, and sums are in float. A softmax weight is the sum of two 16-bit numbers, so it
// is off by 2 ** -17 of itself at most (bfloat16; less in float16).
// Rows of a multiplication are keys, or dimensions of values; columns are heads. Every lane makes 128-bit loads, and
// what it reads is what it must hand over, in an order that is the same for both factors. Scores: a quarter of a key's
// dimensions for each warp. Values: 64 dimensions for each warp.
#pragma once
#include "attention.cuh"
#include "tensor_cores.cuh"

namespace attention {
template <typename T, typename Mask, int D, int NH, int THREADS, bool ADDS, typename E = typename T::Stored,
  typename M = typename Mask::Stored>
__global__ void __launch_bounds__(THREADS, NH > 8 ? 1 : 2) attend_by_tensor_cores(const E* query_at,
  const E* keys_at, const E* values_at, const M* mask_at, float* parts, float2* of_splits, E* out, unsigned int* bounds,
  unsigned int kv_heads, unsigned int queries, unsigned int max_splits, unsigned int length, unsigned int query_batch,
  unsigned int query_kv, unsigned int query_head, unsigned int query_stride, unsigned int key_batch,
  unsigned int key_head, unsigned int key_stride, unsigned int value_batch, unsigned int value_head,
  unsigned int value_stride, unsigned int mask_batch, unsigned int mask_query, unsigned int mask_stride, float scale) {
  constexpr bool MASKED = !Same<Mask, None>::value;
  // The tile: a warp reads 16 * KT keys and 16 * VT values at a time. NT: columns by eights.
  constexpr int KT = 512 / D > 4 ? 4 : 512 / D < 1 ? 1 : 512 / D, VT = 1, NT = (NH + 7) / 8;
  constexpr int WARPS = THREADS / 32, QUARTERS = D / 32 < 4 ? D / 32 : 4, STEPS = D / 32 / QUARTERS;
  constexpr int KEY_STEP = WARPS / QUARTERS * 16, SLICES = D / 64, SETS = WARPS / SLICES, VALUE_STEP = SETS * 16;
  constexpr int COLUMNS = NT * 8, LINE = MAX_KEYS + 4, SHARES = MAX_KEYS / 4 + 4;  // without bank conflicts
  constexpr int SCORES = QUARTERS * COLUMNS * LINE, OTHERS = (SETS - 1) * NT * 16 * SLICES * 32;
  __shared__ __align__(16) float room[SCORES > OTHERS ? SCORES : OTHERS];
  __shared__ uint4 shares[COLUMNS * SHARES];
  __shared__ float tops[NH], sums[NH], factors[NH];
  const float minus_infinity = __uint_as_float(0xff800000u), log2_e = 1.4426950408889634f;
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, row = lane >> 2, col = lane & 3;
  let_next_kernel_begin();
  wait_for_kernel_before();
  const unsigned int kv_head = blockIdx.y % kv_heads, outer = blockIdx.y / kv_heads;
  const unsigned int batch = outer / queries, query = outer % queries;
  const unsigned int first = MASKED ? bounds[outer * RECORD] : 0u;
  const unsigned int count = MASKED ? bounds[outer * RECORD + 1u] : length;
  const Splits<D, true> split_of(count, kv_heads);
  const int per = split_of.per, splits = split_of.count;
  if ((int)blockIdx.x >= splits) return;
  const int quarter = warp % QUARTERS, key_begin = warp / QUARTERS * 16;
  const int slice = warp % SLICES, set = warp / SLICES;
  const E* const query_line = query_at + batch * query_batch + kv_head * query_kv + query * query_stride;
  const char* const keys_line = (const char*)(keys_at + batch * key_batch + kv_head * key_head);
  const char* const values_line = (const char*)(values_at + batch * value_batch + kv_head * value_head);
  const unsigned int keys_from = (quarter * STEPS * 32 + col * 8) * 2u, values_from = (slice * 64 + row * 8) * 2u;
  const unsigned int mask_from = batch * mask_batch + query * mask_query + first * mask_stride;
  // A long query is read again where it is needed: registers are for keys and values.
  constexpr bool KEPT = NT * STEPS <= 2;
  auto read_query = [&](int t, int s) {
    const E* at = query_line + (min(t * 8 + row, NH - 1) * query_head + (quarter * STEPS + s) * 32 + col * 8);
#ifdef ON_HOST
    return *(const Word16*)at;
#else
    Word16 word;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(word.part[0]), "=r"(word.part[1]), "=r"(word.part[2]), "=r"(word.part[3]) : "l"(at));
    return word;
#endif
  };
  Word16 asked[NT][STEPS];
  if (KEPT)
    #pragma unroll
    for (int i = 0; i < NT * STEPS; ++i) asked[i / STEPS][i % STEPS] = read_query(i / STEPS, i % STEPS);

  const int split = blockIdx.x, begin = split * per, all = min(per, count - begin), end = max(all - 1, 0);
  const unsigned int place = first + begin;
  Word16 known[KT][STEPS][2], values[VT][4];
  auto read_keys = [&](int base, Word16 (&words)[STEPS][2]) {
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned int at = (place + min(base + half * 8 + row, end)) * (key_stride * 2u) + keys_from;
      #pragma unroll
      for (int s = 0; s < STEPS; ++s) words[s][half] = load_once(keys_line + at + s * 64);
    }
  };
  auto read_values = [&](int base, Word16 (&words)[4]) {
    #pragma unroll
    for (int j = 0; j < 4; ++j)  // shares are zero where there is no key
      words[j] = load_once(
        values_line + ((place + min(base + col * 4 + j, end)) * (value_stride * 2u) + values_from));
  };
  float value[NT][4][4];  // of heads col * 2 and the next, dimensions row * 8 + 2 m and the next
  #pragma unroll
  for (int i = 0; i < NT * 16; ++i) value[i / 16][i / 4 % 4][i % 4] = 0.0f;
  #pragma unroll
  for (int j = 0; j < KT; ++j)
    if (key_begin + j * KEY_STEP < all) read_keys(key_begin + j * KEY_STEP, known[j]);

  for (int done = 0; done == 0 || done < all; done += MAX_KEYS) {  // as many keys as the block has room for
    const int keys = min(all - done, MAX_KEYS);
    // Values are on their way while scores are computed, and the next keys while values are added.
    #pragma unroll
    for (int j = 0; j < VT; ++j)
      if (set * 16 + j * VALUE_STEP < keys) read_values(done + set * 16 + j * VALUE_STEP, values[j]);
    M bits[4];
    if constexpr (MASKED)
      #pragma unroll
      for (int i = 0; i < 4; ++i)
        bits[i] = mask_at[mask_from + (begin + min(done + lane * 4 + i, end)) * mask_stride];

    for (int from = key_begin; from < keys; from += KT * KEY_STEP)
      #pragma unroll
      for (int j = 0; j < KT; ++j) {
        const int base = from + j * KEY_STEP;
        if (base < keys) {
          #pragma unroll
          for (int t = 0; t < NT; ++t) {
            float one[4] = {0.0f, 0.0f, 0.0f, 0.0f}, two[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            #pragma unroll
            for (int s = 0; s < STEPS; ++s) {
              const Word16 low = known[j][s][0], high = known[j][s][1], by = KEPT ? asked[t][s] : read_query(t, s);
              multiply<T>(one, low.part[0], high.part[0], low.part[1], high.part[1], by.part[0], by.part[1]);
              multiply<T>(two, low.part[2], high.part[2], low.part[3], high.part[3], by.part[2], by.part[3]);
            }
            float* to = room + (quarter * COLUMNS + t * 8 + col * 2) * LINE + base + row;
            to[0] = one[0] + two[0];
            to[LINE] = one[1] + two[1];
            to[8] = one[2] + two[2];
            to[LINE + 8] = one[3] + two[3];
          }
          if (base + KT * KEY_STEP < keys) read_keys(done + base + KT * KEY_STEP, known[j]);
        }
      }
    #pragma unroll
    for (int j = 0; j < KT; ++j)
      if (done + MAX_KEYS + key_begin + j * KEY_STEP < all)
        read_keys(done + MAX_KEYS + key_begin + j * KEY_STEP, known[j]);
    __syncthreads();

    // Shares: four keys of a head for each lane.
    for (int head = warp; head < NH; head += WARPS) {
      float4 score = *(const float4*)(room + head * LINE + lane * 4);
      #pragma unroll
      for (int i = 1; i < QUARTERS; ++i) {
        const float4 more = *(const float4*)(room + (i * COLUMNS + head) * LINE + lane * 4);
        score.x += more.x;
        score.y += more.y;
        score.z += more.z;
        score.w += more.w;
      }
      float share[4] = {score.x, score.y, score.z, score.w}, top = minus_infinity, sum = 0.0f;
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        share[i] = lane * 4 + i < keys ? masked<Mask>(share[i], scale, bits[i]) : minus_infinity;
        top = fmaxf(top, share[i]);
      }
      #pragma unroll
      for (int by = 16; by > 0; by >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, by));
      const float before = done ? tops[head] : minus_infinity;
      top = fmaxf(top, before);
      float less[4];
      #pragma unroll
      for (int i = 0; i < 4; ++i) {
        share[i] = share[i] == minus_infinity ? 0.0f : exp2f((share[i] - top) * log2_e);
        sum += share[i];
        less[i] = share[i] - T::rounded(share[i]);
      }
      #pragma unroll
      for (int by = 16; by > 0; by >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, by);
      if (lane == 0) {
        const float factor = before == minus_infinity ? 0.0f : exp2f((before - top) * log2_e);
        sums[head] = done ? fmaf(sums[head], factor, sum) : sum;
        tops[head] = top;
        factors[head] = factor;
      }
      shares[head * SHARES + lane] = make_uint4(T::pair(share[0], share[1]), T::pair(share[2], share[3]),
        T::pair(less[0], less[1]), T::pair(less[2], less[3]));
    }
    __syncthreads();

    if (done)
      #pragma unroll
      for (int i = 0; i < NT * 16; ++i)
        value[i / 16][i / 4 % 4][i % 4] *= factors[min(i / 16 * 8 + col * 2 + i % 2, NH - 1)];
    for (int from = set * 16; from < keys; from += VT * VALUE_STEP)
      #pragma unroll
      for (int j = 0; j < VT; ++j) {
        const int base = from + j * VALUE_STEP;
        if (base < keys) {
          uint4 by[NT];
          #pragma unroll
          for (int t = 0; t < NT; ++t) by[t] = shares[(t * 8 + row) * SHARES + base / 4 + col];
          #pragma unroll
          for (int m = 0; m < 4; ++m) {
            const unsigned int v0 = values[j][0].part[m], v1 = values[j][1].part[m];
            const unsigned int v2 = values[j][2].part[m], v3 = values[j][3].part[m];
            const unsigned int a0 = __byte_perm(v0, v1, 0x5410u), a1 = __byte_perm(v0, v1, 0x7632u);
            const unsigned int a2 = __byte_perm(v2, v3, 0x5410u), a3 = __byte_perm(v2, v3, 0x7632u);
            #pragma unroll
            for (int t = 0; t < NT; ++t) {
              multiply<T>(value[t][m], a0, a1, a2, a3, by[t].z, by[t].w);
              multiply<T>(value[t][m], a0, a1, a2, a3, by[t].x, by[t].y);
            }
          }
          if (base + VT * VALUE_STEP < keys) read_values(done + base + VT * VALUE_STEP, values[j]);
        }
      }
  }
  if (SETS > 1) {  // keys were divided among warps
    float4* const others = (float4*)room + slice * 32 + lane;
    #pragma unroll
    for (int i = 0; i < NT * 4; ++i) {
      const float* one = value[i / 4][i % 4];
      if (set > 0) others[((set - 1) * NT * 4 + i) * (SLICES * 32)] = make_float4(one[0], one[1], one[2], one[3]);
    }
    __syncthreads();
    if (set == 0)
      #pragma unroll
      for (int i = 0; i < NT * 4; ++i)
        #pragma unroll
        for (int other = 0; other < SETS - 1; ++other) {
          const float4 one = others[(other * NT * 4 + i) * (SLICES * 32)];
          value[i / 4][i % 4][0] += one.x;
          value[i / 4][i % 4][1] += one.y;
          value[i / 4][i % 4][2] += one.z;
          value[i / 4][i % 4][3] += one.w;
        }
  }
  if (set == 0)
    #pragma unroll
    for (int i = 0; i < NT * 2; ++i) {
      const int t = i / 2, h = i % 2, head = t * 8 + col * 2 + h, at = head * D + slice * 64 + row * 8;
      if (head >= NH) continue;
      if (splits == 1) {
        const float sum = sums[head];
        Word16 word;
        #pragma unroll
        for (int m = 0; m < 4; ++m)
          word.part[m] = sum == 0.0f ? 0u : T::pair(value[t][m][h] / sum, value[t][m][2 + h] / sum);
        *(Word16*)(out + (outer * (unsigned long long)kv_heads + kv_head) * (NH * D) + at) = word;
      } else {
        float4* to = (float4*)(parts + (blockIdx.y * (unsigned long long)max_splits + split) * (NH * D) + at);
        to[0] = make_float4(value[t][0][h], value[t][0][2 + h], value[t][1][h], value[t][1][2 + h]);
        to[1] = make_float4(value[t][2][h], value[t][2][2 + h], value[t][3][h], value[t][3][2 + h]);
      }
    }
  if (splits > 1 && thread < NH)
    of_splits[(blockIdx.y * (unsigned long long)max_splits + split) * NH + thread] =
      make_float2(tops[thread], sums[thread]);
  __syncthreads();
  if constexpr (ADDS)
    add_up<T, D, NH, THREADS>(bounds, parts, of_splits, out, kv_heads, max_splits, outer, kv_head, splits, sums);
}
}  // namespace attention
