// Attention of many queries over a cache, in one pass over the keys (FlashAttention), by tensor cores.
//
// Launched by specs/flash.py, which chooses the tile (`_TILINGS`) by what shared memory holds. Tests:
// tests/unit/kernels/test_flash.py, against attention in float64, and test_kernels_compile.py for registers and memory.
//
// Kernels: `bounds` finds the valid keys of each query. `attend` computes; `sum` adds up its parts, if there are some.
// A block computes M rows, the query heads of consecutive tokens that share keys, against NK keys at a time (a tile).
// Queries, keys and values are in shared memory, in 128-bit words whose place within 128 bytes depends on the row,
// so that the eight rows a tensor core asks for are in different banks. Scores: WR parts of the warps divide rows, WK
// keys, and in wide heads WC the dimensions, whose sums they exchange. Values: each warp adds up 64 dimensions of its
// rows. Keys are on their way while values are multiplied, and values while keys are.
#pragma once
#include "prelude.cuh"
#include "tensor_cores.cuh"

namespace flash {
// What is known of the mask of a query: the first valid key, the one after the last, how many there are, and nothing.
template <int THREADS>
__global__ void __launch_bounds__(THREADS) bounds(const unsigned char* mask_at, uint4* bounds, unsigned int queries,
  unsigned int length, unsigned int mask_batch, unsigned int mask_query) {
  __shared__ unsigned int firsts[8], ends[8], counts[8];
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const unsigned int batch = blockIdx.x / queries, query = blockIdx.x % queries;
  const unsigned char* const mask = mask_at + (unsigned long long)batch * mask_batch
    + (unsigned long long)query * mask_query;
  unsigned int first = 0xffffffffu, end = 0u, count = 0u;
  auto see = [&](unsigned int bits, unsigned int key) {  // four keys
    if (!bits) return;
    #pragma unroll
    for (int i = 0; i < 4; ++i)
      if (bits >> (8 * i) & 255u) {
        first = min(first, key + i);
        end = key + i + 1u;
        ++count;
      }
  };
  if (((unsigned long long)mask & 15u) == 0u && length % 16u == 0u) {
    for (unsigned int at = thread * 16u; at < length; at += 256u * 16u) {
      const Word16 word = *(const Word16*)(mask + at);
      #pragma unroll
      for (int i = 0; i < 4; ++i) see(word.part[i], at + i * 4u);
    }
  } else {
    for (unsigned int at = thread; at < length; at += 256u) see(mask[at], at);
  }
  #pragma unroll
  for (int by = 16; by > 0; by >>= 1) {
    first = min(first, __shfl_xor_sync(0xffffffffu, first, by));
    end = max(end, __shfl_xor_sync(0xffffffffu, end, by));
    count += __shfl_xor_sync(0xffffffffu, count, by);
  }
  if (lane == 0) firsts[warp] = first, ends[warp] = end, counts[warp] = count;
  __syncthreads();
  if (thread == 0) {
    for (int i = 1; i < 8; ++i) first = min(first, firsts[i]), end = max(end, ends[i]), count += counts[i];
    bounds[blockIdx.x] = make_uint4(first, end, count, 0u);
  }
}

// D: of a head. G: heads that share keys. STREAMS: blocks that compute a row together, each every other tile. SEGMENT:
// tiles of a block after which its sums go to `parts` and `of_streams`; 0: they do not, and `out` is the result. ROOM:
// bytes of shared memory. SHARED_ROOM: sums of scores are exchanged where the keys were. Only a kernel that is MASKED
// reads `mask_at` and `bounds`; otherwise token i attends to keys 0 to i.
template <typename T, bool MASKED, int D, int G, int STREAMS, int M, int NK, int WR, int WK, int WC, int SEGMENT,
  int SHARED_ROOM, int ROOM>
__global__ void __launch_bounds__(256, 1) attend(const u16* query_at, const u16* keys_at, const u16* values_at,
  const unsigned char* mask_at, const uint4* bounds, float* parts, float2* of_streams, u16* out, unsigned int tokens,
  unsigned int begin, unsigned int kv_heads, unsigned int query_batch, unsigned int query_kv, unsigned int query_head,
  unsigned int query_stride, unsigned int key_batch, unsigned int key_head, unsigned int key_stride,
  unsigned int value_batch, unsigned int value_head, unsigned int value_stride, unsigned int mask_batch,
  unsigned int mask_query, float scale) {
  constexpr int LINE = D * 2, Q_AT = 0, K_AT = M * LINE, V_AT = K_AT + NK * LINE;
  constexpr int P_LINE = NK * 2 + 16, P_AT = V_AT + NK * LINE, ALPHA_AT = P_AT + M * P_LINE;
  constexpr int BEHIND_AT = ALPHA_AT + M * 4, ROWS_AT = BEHIND_AT + M * 4;
  constexpr int MT = M / WR / 16, NT = NK / WK / 8;  // pieces of 16 rows and 8 keys of a warp
  constexpr int OWN = MT * NT / WC, RT = OWN > NT ? OWN / NT : 1, KT = OWN > NT ? NT : OWN;  // which it adds up
  constexpr int GROUPS = WK * (NT / KT);  // warps that share a row
  constexpr int EXCHANGED = WC > 1 ? 8 * OWN * 512 : 0, FREE_AT = SHARED_ROOM ? K_AT : ROWS_AT + M * 8;
  constexpr int OTHERS_AT = FREE_AT, TOPS_AT = FREE_AT + EXCHANGED;
  constexpr int PC = D / 64, PT = M / (8 / PC) / 16, STEPS = D / 16 / WC;
#ifdef ON_HOST
  __shared__ __align__(128) unsigned char room[ROOM];
#else
  extern __shared__ __align__(128) unsigned char room[];
#endif
  const float minus_infinity = __uint_as_float(0xff800000u);
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, row = lane >> 2, col = lane & 3;
  // Four matrices of 8 rows of 16 bytes; each lane has the place of a row.
#ifdef ON_HOST
  auto matrices = [&](int at, unsigned int (&x)[4]) {
    for (int m = 0; m < 4; ++m) {
      const int from = __shfl_sync(0xffffffffu, at, m * 8 + row);
      x[m] = *(const unsigned int*)(room + from + col * 4);
    }
  };
  auto transposed = [&](int at, unsigned int (&x)[4]) {
    for (int m = 0; m < 4; ++m) {
      const int low = __shfl_sync(0xffffffffu, at, m * 8 + col * 2);
      const int high = __shfl_sync(0xffffffffu, at, m * 8 + col * 2 + 1);
      x[m] = *(const u16*)(room + low + row * 2) | (unsigned int)*(const u16*)(room + high + row * 2) << 16;
    }
  };
  auto copy = [&](int to, const void* from) { *(Word16*)(room + to) = *(const Word16*)from; };
  auto copied = [&](bool) {};
  auto commit = [&]() {};
#else
  const unsigned int base = (unsigned int)__cvta_generic_to_shared(room);
  auto matrices = [&](int at, unsigned int (&x)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(base + at));
  };
  auto transposed = [&](int at, unsigned int (&x)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(base + at));
  };
#if __CUDA_ARCH__ >= 800
  auto copy = [&](int to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(base + to), "l"(from) : "memory");
  };
  auto commit = [&]() { asm volatile("cp.async.commit_group;" ::: "memory"); };
  auto copied = [&](bool all) {  // or all but those that were begun last
    if (all) asm volatile("cp.async.wait_group 0;" ::: "memory");
    else asm volatile("cp.async.wait_group 1;" ::: "memory");
  };
#else
  auto copy = [&](int to, const void* from) { *(Word16*)(room + to) = *(const Word16*)from; };
  auto commit = [&]() {};
  auto copied = [&](bool) {};
#endif
#endif
  const unsigned int kv_head = blockIdx.y % kv_heads, batch = blockIdx.y / kv_heads;
  const unsigned int blocks = gridDim.x / STREAMS, block = blocks - 1u - blockIdx.x / STREAMS;  // the longest first
  const unsigned int stream = blockIdx.x % STREAMS, row_from = begin * G + block * M, rows = tokens * G;
  const u16* const query =
    query_at + (unsigned long long)batch * query_batch + (unsigned long long)kv_head * query_kv;
  const u16* const keys = keys_at + (unsigned long long)batch * key_batch + (unsigned long long)kv_head * key_head;
  const u16* const values =
    values_at + (unsigned long long)batch * value_batch + (unsigned long long)kv_head * value_head;

  #pragma unroll 4
  for (int i = thread; i < M * (D / 8); i += 256) {
    const int r = i / (D / 8), chunk = i % (D / 8);
    const unsigned int of = min(row_from + r, rows - 1u);
    copy(Q_AT + r * LINE + ((chunk ^ (r & 7)) << 4), query + (unsigned long long)(of / G) * query_stride
      + (unsigned long long)(of % G) * query_head + chunk * 8);
  }
  commit();
  // Valid keys of each row, and of all.
  uint2* const bounds_of = (uint2*)(room + ROWS_AT);
  unsigned int first = 0xffffffffu, inner_first = 0u, end = 0u, inner_end = 0xffffffffu, has_holes = 0u;
  for (int r = lane; r < M; r += 32) {
    const unsigned int of = row_from + r;
    unsigned int begins = 0xffffffffu, ends = 0u;
    if (of < rows) {
      if constexpr (MASKED) {
        const uint4 one = bounds[batch * tokens + of / G];
        begins = one.x;
        ends = one.y;
        if (one.z && one.z != ends - begins) has_holes = 1u;
      } else {
        begins = 0u, ends = of / G + 1u;
      }
      first = min(first, begins);
      inner_first = max(inner_first, begins);
      end = max(end, ends);
      inner_end = min(inner_end, ends);
    }
    if (warp == 0) bounds_of[r] = make_uint2(begins, ends);
  }
  #pragma unroll
  for (int by = 16; by > 0; by >>= 1) {
    first = min(first, __shfl_xor_sync(0xffffffffu, first, by));
    inner_first = max(inner_first, __shfl_xor_sync(0xffffffffu, inner_first, by));
    end = max(end, __shfl_xor_sync(0xffffffffu, end, by));
    inner_end = min(inner_end, __shfl_xor_sync(0xffffffffu, inner_end, by));
    has_holes |= __shfl_xor_sync(0xffffffffu, has_holes, by);
  }
  const int tiles = first < end ? (int)((end - first + NK - 1u) / NK) : 0;

  auto read = [&](int at, const u16* from, unsigned int stride, int tile) {
    const unsigned int key = first + tile * NK, chunk = thread % (D / 8);
    #pragma unroll 2
    for (int r = thread / (D / 8); r < NK; r += 256 / (D / 8))
      copy(at + r * LINE + ((chunk ^ (r & 7)) << 4),
        from + (unsigned long long)min(key + r, end - 1u) * stride + chunk * 8);
  };
  const int wr = warp / (WK * WC), wk = warp / WC % WK, wc = warp % WC;  // rows, keys, dimensions of scores
  const int pr = warp / PC, pc = warp % PC;  // rows, dimensions of values
  const int own_row = wr * (M / WR) + (OWN > NT ? wc * RT * 16 : wc * OWN / NT * 16) + row;  // of sums of scores
  const int own_key = wk * (NK / WK) + wc * OWN % NT * 8 + col * 2, group = wk * (NT / KT) + wc * OWN % NT / KT;
  float value[PT][8][4], top[RT * 2], sum[RT * 2];
  #pragma unroll
  for (int i = 0; i < PT * 32; ++i) value[i / 32][i / 4 % 8][i % 4] = 0.0f;
  #pragma unroll
  for (int i = 0; i < RT * 2; ++i) top[i] = minus_infinity, sum[i] = 0.0f;
  float* const tops = (float*)(room + TOPS_AT);
  float* const factors = (float*)(room + ALPHA_AT);
  // Tensor cores do not round to nearest when they add: after a segment of many keys, sums go to memory, and those of
  // the next one begin at zero.
  float* const behind = (float*)(room + BEHIND_AT);  // a factor of the sums in memory
  bool is_kept = false;
  auto keep = [&](int i) {
    const int r = pr * PT * 16 + i * 8 + row;
    float* const to = parts + (((unsigned long long)blockIdx.y * STREAMS + stream) * (blocks * M) + block * M + r) * D
      + pc * 64 + col * 2;
    const float by = is_kept ? behind[r] : 0.0f;
    #pragma unroll
    for (int n = 0; n < 8; ++n) {
      float* const of = value[i / 2][n] + i % 2 * 2;
      if (is_kept) {
        const float2 before = *(const float2*)(to + n * 8);
        of[0] = fmaf(before.x, by, of[0]);
        of[1] = fmaf(before.y, by, of[1]);
      }
      *(float2*)(to + n * 8) = make_float2(of[0], of[1]);
      of[0] = of[1] = 0.0f;
    }
  };
  if ((int)stream < tiles) read(K_AT, keys, key_stride, stream);
  commit();

  for (int tile = stream; tile < tiles; tile += STREAMS) {
    copied(true);
    __syncthreads();
    read(V_AT, values, value_stride, tile);
    commit();
    float score[MT * NT][4];
    #pragma unroll
    for (int i = 0; i < MT * NT * 4; ++i) score[i / 4][i % 4] = 0.0f;
    {
      const int q_from = Q_AT + (wr * (M / WR) + (lane & 15)) * LINE + wc * STEPS * 32
        + (((lane >> 4) ^ (lane & 7)) << 4);
      const int k_from = K_AT + (wk * (NK / WK) + (lane & 7) + (lane >> 4) * 8) * LINE + wc * STEPS * 32
        + (((lane >> 3 & 1) ^ (lane & 7)) << 4);
      #pragma unroll 1
      for (int far = 0; far < STEPS / 4; ++far)
        #pragma unroll
        for (int near = 0; near < 4; ++near) {
          unsigned int a[MT][4], b[NT / 2][4];
          #pragma unroll
          for (int m = 0; m < MT; ++m) matrices(((q_from + far * 128) ^ (near * 32)) + m * 16 * LINE, a[m]);
          #pragma unroll
          for (int n = 0; n < NT / 2; ++n) matrices(((k_from + far * 128) ^ (near * 32)) + n * 16 * LINE, b[n]);
          #pragma unroll
          for (int m = 0; m < MT; ++m)
            #pragma unroll
            for (int n = 0; n < NT; ++n)
              multiply<T>(score[m * NT + n], a[m][0], a[m][1], a[m][2], a[m][3], b[n / 2][n % 2 * 2],
                b[n / 2][n % 2 * 2 + 1]);
        }
    }
    float own[OWN][4];
    if (WC > 1) {
      if (SHARED_ROOM) __syncthreads();
      float4* const others = (float4*)(room + OTHERS_AT) + (warp / WC) * (WC * OWN * 32) + lane;
      #pragma unroll
      for (int f = 0; f < MT * NT; ++f)
        if (f / OWN != wc)
          others[f * 32] = make_float4(score[f][0], score[f][1], score[f][2], score[f][3]);
        else
          #pragma unroll
          for (int i = 0; i < 4; ++i) own[f % OWN][i] = score[f][i];
      __syncthreads();
      #pragma unroll
      for (int f = 0; f < OWN; ++f) {
        const float4 other = others[(wc * OWN + f) * 32];
        own[f][0] += other.x;
        own[f][1] += other.y;
        own[f][2] += other.z;
        own[f][3] += other.w;
      }
    } else {
      #pragma unroll
      for (int i = 0; i < OWN * 4; ++i) own[i / 4][i % 4] = score[i / 4][i % 4];
      __syncthreads();
    }
    if (!SHARED_ROOM) {
      if (tile + STREAMS < tiles) read(K_AT, keys, key_stride, tile + STREAMS);
      commit();
    }
    const unsigned int from = first + tile * NK;
    if (from < inner_first || from + NK > inner_end || has_holes) {
      #pragma unroll
      for (int i = 0; i < RT * 2; ++i) {
        const int r = own_row + i * 8;
        const uint2 valid = bounds_of[r];
        const unsigned char* mask;
        if constexpr (MASKED)
          mask = mask_at + (unsigned long long)batch * mask_batch
            + (unsigned long long)min((row_from + r) / G, tokens - 1u) * mask_query;
        #pragma unroll
        for (int k = 0; k < KT * 2; ++k) {
          const unsigned int key = from + own_key + k / 2 * 8 + k % 2;
          if (key < valid.x || key >= valid.y || (MASKED && has_holes && !mask[key]))
            own[i / 2 * KT + k / 2][i % 2 * 2 + k % 2] = minus_infinity;
        }
      }
    }
    #pragma unroll
    for (int i = 0; i < RT * 2; ++i) {
      float most = minus_infinity;
      #pragma unroll
      for (int k = 0; k < KT * 2; ++k) most = fmaxf(most, own[i / 2 * KT + k / 2][i % 2 * 2 + k % 2]);
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      if (col == 0) tops[(own_row + i * 8) * GROUPS + group] = most;
    }
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < RT * 2; ++i) {
      const int r = own_row + i * 8;
      const float before = top[i];
      float most = before;
      #pragma unroll
      for (int g = 0; g < GROUPS; ++g) most = fmaxf(most, tops[r * GROUPS + g]);
      const float factor = most == before ? 1.0f : exp2f((before - most) * scale);
      const float less = most == minus_infinity ? 0.0f : most * scale;
      top[i] = most;
      sum[i] *= factor;
      if (group == 0 && col == 0) {
        factors[r] = factor;
        if constexpr (SEGMENT > 0) behind[r] = tile / STREAMS % SEGMENT ? behind[r] * factor : factor;
      }
      #pragma unroll
      for (int k = 0; k < KT; ++k) {
        float* const of = own[i / 2 * KT + k] + i % 2 * 2;
        const unsigned int pair =
          T::pair(exp2f(fmaf(of[0], scale, -less)), exp2f(fmaf(of[1], scale, -less)));
        sum[i] += T::load((u16)(pair & 0xffffu)) + T::load((u16)(pair >> 16));
        *(unsigned int*)(room + P_AT + r * P_LINE + (own_key + k * 8) * 2) = pair;
      }
    }
    copied(SHARED_ROOM != 0);
    __syncthreads();
    if (SHARED_ROOM) {
      if (tile + STREAMS < tiles) read(K_AT, keys, key_stride, tile + STREAMS);
      commit();
    }
    {
      float by[PT * 2];
      bool changed = false;
      #pragma unroll
      for (int i = 0; i < PT * 2; ++i) {
        by[i] = factors[pr * PT * 16 + i * 8 + row];
        changed = changed || by[i] != 1.0f;
      }
      if (__any_sync(0xffffffffu, changed))
        #pragma unroll
        for (int i = 0; i < PT * 32; ++i) value[i / 32][i / 4 % 8][i % 4] *= by[i / 32 * 2 + i % 4 / 2];
      const int p_from = P_AT + (pr * PT * 16 + (lane & 15)) * P_LINE + (lane >> 4) * 16;
      const int v_from = V_AT + (lane & 15) * LINE + pc * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
      #pragma unroll
      for (int k = 0; k < NK / 16; ++k) {
        unsigned int a[PT][4];
        #pragma unroll
        for (int m = 0; m < PT; ++m) matrices(p_from + k * 32 + m * 16 * P_LINE, a[m]);
        #pragma unroll
        for (int n = 0; n < 4; ++n) {
          unsigned int b[4];
          transposed((v_from + k * 16 * LINE) ^ (n * 32), b);
          #pragma unroll
          for (int m = 0; m < PT; ++m) {
            multiply<T>(value[m][n * 2], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
            multiply<T>(value[m][n * 2 + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
          }
        }
      }
    }
    if constexpr (SEGMENT > 0)
      if (tile / STREAMS % SEGMENT == SEGMENT - 1 && tile + STREAMS < tiles) {
        #pragma unroll
        for (int i = 0; i < PT * 2; ++i) keep(i);
        is_kept = true;
      }
  }
  // The sums of all warps that share a row.
  copied(true);
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < RT * 2; ++i) {
    sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 1);
    sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 2);
    if (col == 0) tops[(own_row + i * 8) * GROUPS + group] = sum[i];
  }
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < RT * 2; ++i) {
    const int r = own_row + i * 8;
    if (group != 0 || col != 0) continue;
    float all = tops[r * GROUPS];
    #pragma unroll
    for (int g = 1; g < GROUPS; ++g) all += tops[r * GROUPS + g];
    if constexpr (SEGMENT > 0)
      of_streams[((unsigned long long)blockIdx.y * STREAMS + stream) * (blocks * M) + block * M + r] =
        make_float2(top[i], all);
    else
      factors[r] = all == 0.0f ? 0.0f : 1.0f / all;
  }
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < PT * 2; ++i) {
    const int r = pr * PT * 16 + i * 8 + row;
    const unsigned int of = row_from + r;
    if (of >= rows) continue;
    if constexpr (SEGMENT > 0) {
      keep(i);
    } else {
      u16* const to =
        out + (((unsigned long long)batch * tokens + of / G) * kv_heads + kv_head) * (G * D) + of % G * D;
      const float by = factors[r];
      #pragma unroll
      for (int n = 0; n < 8; ++n)
        *(unsigned int*)(to + pc * 64 + n * 8 + col * 2) =
          T::pair(value[i / 2][n][i % 2 * 2] * by, value[i / 2][n][i % 2 * 2 + 1] * by);
    }
  }
}

template <typename T, int D, int G, int STREAMS>
__global__ void __launch_bounds__(256) sum(const float* parts, const float2* of_streams, u16* out, unsigned int tokens,
  unsigned int begin, unsigned int kv_heads, unsigned int padded, float scale) {
  const unsigned int element = (blockIdx.x * 256u + threadIdx.x) * 4u, part_of = element / D, of = begin * G + part_of;
  if (part_of >= padded || of >= tokens * G) return;
  const unsigned int kv_head = blockIdx.y % kv_heads, batch = blockIdx.y / kv_heads;
  float2 known[STREAMS];
  float top = __uint_as_float(0xff800000u), sum = 0.0f, all[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  #pragma unroll
  for (int s = 0; s < STREAMS; ++s) {
    known[s] = of_streams[((unsigned long long)blockIdx.y * STREAMS + s) * padded + part_of];
    top = fmaxf(top, known[s].x);
  }
  #pragma unroll
  for (int s = 0; s < STREAMS; ++s) {
    const float4 part = *(const float4*)(parts
      + (((unsigned long long)blockIdx.y * STREAMS + s) * padded + part_of) * D + element % D);
    const float by = known[s].x == top ? 1.0f : exp2f((known[s].x - top) * scale);
    sum = fmaf(known[s].y, by, sum);
    all[0] = fmaf(part.x, by, all[0]);
    all[1] = fmaf(part.y, by, all[1]);
    all[2] = fmaf(part.z, by, all[2]);
    all[3] = fmaf(part.w, by, all[3]);
  }
  const float by = sum == 0.0f ? 0.0f : 1.0f / sum;
  u16* const to = out + (((unsigned long long)batch * tokens + of / G) * kv_heads + kv_head) * (G * D) + of % G * D;
  *(uint2*)(to + element % D) = make_uint2(T::pair(all[0] * by, all[1] * by), T::pair(all[2] * by, all[3] * by));
}
}  // namespace flash
