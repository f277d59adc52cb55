// Attention of one query position over a cache, its keys divided among blocks ("splits").
//
// Launched by specs/attention.py, which says what decides bits. Tests: tests/unit/kernels/test_attention.py, against
// attention in float64, and test_kernels_compile.py for the registers that a tile takes.
//
// Kernels: `bounds` finds the valid keys of each row of a mask. `attend` computes, or `attend_by_tensor_cores` in
// attention_tensor.cuh. `sum` adds up splits. Without a mask, they read neither a mask nor its bounds.
// A score is summed over a lane's dimensions, then over lanes; a value over the keys of a group of threads, then over
// groups, then over splits: that is the same for every number of heads.
#pragma once
#include "prelude.cuh"

namespace attention {
enum : unsigned int {
  RECORD = 66,  // integers that `bounds` writes for each query: the first key, how many, and counters of blocks
};
enum {
  FEW = 32,         // splits at most that the last block of a head adds up itself
  MANY = 4096,      // splits at most
  MAX_KEYS = 128,   // of a split, by lanes
  BLOCKS = 264,     // the next ones as in specs/attention.py
  FEWEST = 32,
  FEWER = 64,
  ALONE = 1 << 15,
};

// No mask: all of `length` keys.
struct None {
  using Stored = unsigned char;
};

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

template <typename Mask> __device__ __forceinline__ bool lets_through(typename Mask::Stored bits) {
  if constexpr (Same<Mask, Bool>::value) return bits != 0;
  else return Mask::load(bits) > Mask::lowest() / 2;
}

template <typename Mask>
__device__ __forceinline__ float masked(float sum, float scale, typename Mask::Stored bits) {
  if constexpr (Same<Mask, None>::value) return __fmul_rn(sum, scale);
  else if constexpr (Same<Mask, Bool>::value) return bits ? __fmul_rn(sum, scale) : minus_infinity();
  else return __fadd_rn(__fmul_rn(sum, scale), Mask::load(bits));
}

// How many splits there are, and how many keys each has: `splits` in test_attention.py computes the same.
template <int D, bool TENSOR> struct Splits {
  int per, count;
  __device__ __forceinline__ Splits(unsigned int keys, unsigned int kv_heads) {
    constexpr int IN_D = ALONE / D, AT_MOST = IN_D < MAX_KEYS ? IN_D : MAX_KEYS;
    constexpr int ONE = AT_MOST > FEWEST ? AT_MOST : FEWEST, MOST = TENSOR ? 1 << 30 : MAX_KEYS;
    const int wanted = (int)((keys * kv_heads + (BLOCKS * 4 - 1u)) / (BLOCKS * 4u)) * 4;
    const int fewest = keys * kv_heads <= BLOCKS / 2 * FEWEST + 0u ? FEWEST : FEWER;
    per = keys <= ONE + 0u ? ONE : min(max(wanted, fewest), MOST);
    count = max((int)((keys + per - 1u) / per), 1);
  }
};

// One block for each row of the mask. A word of 16 bytes that holds a byte of a row is in the mask's memory.
template <typename Mask, typename M = typename Mask::Stored>
__global__ void __launch_bounds__(1024) bounds(const M* mask, unsigned int* __restrict__ bounds,
  unsigned int queries, unsigned int length, unsigned int batch_stride, unsigned int query_stride,
  unsigned int key_stride) {
  __shared__ unsigned int firsts[32], lasts[32], somes[32];
  let_next_kernel_begin();
  wait_for_kernel_before();
  const unsigned int row = blockIdx.x, thread = threadIdx.x, lane = thread & 31u, warp = thread >> 5;
  const M* line = mask + (unsigned long long)(row / queries) * batch_stride +
    (unsigned long long)(row % queries) * query_stride;
  unsigned int first = length, last = 0u, some = 0u;  // last: one past the last
  auto look = [&](unsigned int key, M bits) {
    if (lets_through<Mask>(bits)) {
      first = min(first, key);
      last = max(last, key + 1u);
    }
    if constexpr (!Same<Mask, Bool>::value) some |= Mask::load(bits) > minus_infinity() ? 1u : 0u;
  };
  if (key_stride == 1u) {
    constexpr unsigned int each = 16u / sizeof(M);
    const unsigned int before = (unsigned int)((unsigned long long)line % 16u) / sizeof(M);
    const Word16* words = (const Word16*)(line - before);
    const unsigned int count = (before + length + each - 1u) / each;
    #pragma unroll 4
    for (unsigned int i = thread; i < count; i += blockDim.x) {
      const Word16 word = words[i];
      #pragma unroll
      for (unsigned int j = 0; j < each; ++j) {
        const unsigned int key = i * each + j - before;  // wraps around before the row
        const unsigned int bits = word.part[j * sizeof(M) / 4u] >> (j * sizeof(M) % 4u * 8u);
        if (key < length) look(key, Mask::of_bits(bits));
      }
    }
  } else {
    for (unsigned int key = thread; key < length; key += blockDim.x)
      look(key, line[(unsigned long long)key * key_stride]);
  }
  #pragma unroll
  for (int by = 16; by > 0; by >>= 1) {
    first = min(first, __shfl_xor_sync(0xffffffffu, first, by));
    last = max(last, __shfl_xor_sync(0xffffffffu, last, by));
    some |= __shfl_xor_sync(0xffffffffu, some, by);
  }
  if (lane == 0u) firsts[warp] = first, lasts[warp] = last, somes[warp] = some;
  __syncthreads();
  unsigned int* record = bounds + row * RECORD;
  for (unsigned int i = 2u + thread; i < RECORD; i += blockDim.x) record[i] = 0u;
  if (thread == 0u) {
    for (unsigned int i = 1u; i < blockDim.x / 32u; ++i) {
      first = min(first, firsts[i]);
      last = max(last, lasts[i]);
      some |= somes[i];
    }
    if (last == 0u) first = 0u, last = some ? length : 0u;
    record[0] = first;
    record[1] = last - first;
  }
}

// The last block of a head adds up few splits; the same additions as in `sum`.
template <typename T, int D, int NH, int THREADS>
__device__ __forceinline__ void add_up(unsigned int* bounds, const float* parts, const float2* of_splits,
  typename T::Stored* out, unsigned int kv_heads, unsigned int max_splits, unsigned int outer, unsigned int kv_head,
  int splits, float* sums) {
  const float minus_infinity = __uint_as_float(0xff800000u), log2_e = 1.4426950408889634f;
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  constexpr int WARPS = THREADS / 32;
  if (splits == 1) return;
  __shared__ float weights[NH][FEW];
  __shared__ unsigned int is_last;
  if (thread == 0) {
    const unsigned int done = (splits - 1 - blockIdx.x) / gridDim.x + 1;  // of this block
    __threadfence();  // what the block has written before its last barrier
    const unsigned int before = atomicAdd(&bounds[outer * RECORD + 2 + kv_head], done);
    __threadfence();
    is_last = before + done == (unsigned int)splits;
    if (is_last) bounds[outer * RECORD + 2 + kv_head] = 0u;  // for the next layer
  }
  __syncthreads();
  if (!is_last) return;
  constexpr int BATCH = 16;
  const float* const all_parts = parts + blockIdx.y * (unsigned long long)max_splits * (NH * D);
  float4 part[BATCH];
  auto read_parts = [&](int at, int base) {
    #pragma unroll
    for (int i = 0; i < BATCH; ++i)
      if (base + i < splits) part[i] = __ldcg((const float4*)(all_parts + (base + i) * (NH * D) + at));
  };
  if (thread * 4 < NH * D) read_parts(thread * 4, 0);  // on their way while weights are computed
  for (int head = warp; head < NH; head += WARPS) {
    float2 known = make_float2(minus_infinity, 0.0f);
    if (lane < splits) known = __ldcg(&of_splits[(blockIdx.y * (unsigned long long)max_splits + lane) * NH + head]);
    float top = known.x;
    #pragma unroll
    for (int by = 16; by > 0; by >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, by));
    const float weight = known.x == minus_infinity ? 0.0f : exp2f((known.x - top) * log2_e);
    float sum = __fmul_rn(weight, known.y);
    #pragma unroll
    for (int by = 16; by > 0; by >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, by);
    weights[head][lane] = weight;
    if (lane == 0) sums[head] = sum;
  }
  __syncthreads();
  for (int at = thread * 4; at < NH * D; at += THREADS * 4) {
    const int head = at / D;
    float4 whole = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int base = 0; base < splits; base += BATCH) {
      if (at != thread * 4 || base > 0) read_parts(at, base);
      #pragma unroll
      for (int i = 0; i < BATCH; ++i)
        if (base + i < splits) {
          const float weight = weights[head][base + i];
          whole.x = __fadd_rn(whole.x, __fmul_rn(weight, part[i].x));
          whole.y = __fadd_rn(whole.y, __fmul_rn(weight, part[i].y));
          whole.z = __fadd_rn(whole.z, __fmul_rn(weight, part[i].z));
          whole.w = __fadd_rn(whole.w, __fmul_rn(weight, part[i].w));
        }
    }
    const float sum = sums[head];
    typename T::Stored* to = out + (outer * (unsigned long long)kv_heads + kv_head) * (NH * D) + at;
    to[0] = T::stored(sum == 0.0f ? 0.0f : whole.x / sum);
    to[1] = T::stored(sum == 0.0f ? 0.0f : whole.y / sum);
    to[2] = T::stored(sum == 0.0f ? 0.0f : whole.z / sum);
    to[3] = T::stored(sum == 0.0f ? 0.0f : whole.w / sum);
  }
}

// ADDS: the last block of a head adds up its splits, and counts in `bounds`.
template <typename T, typename Mask, int D, int NH, int THREADS, bool ADDS, typename E = typename T::Stored,
  typename M = typename Mask::Stored>
__global__ void __launch_bounds__(THREADS, THREADS > 256 ? 1 : 2) attend(const E* query_at, const E* keys_at,
  const E* values_at, const M* mask_at, float* parts, float2* of_splits, E* out, unsigned int* bounds,
  unsigned int kv_heads, unsigned int queries, unsigned int max_splits, unsigned int length, unsigned int query_batch,
  unsigned int query_kv, unsigned int query_head, unsigned int query_stride, unsigned int key_batch,
  unsigned int key_head, unsigned int key_stride, unsigned int value_batch, unsigned int value_head,
  unsigned int value_stride, unsigned int mask_batch, unsigned int mask_query, unsigned int mask_stride, float scale) {
  constexpr bool MASKED = !Same<Mask, None>::value;
  // The tile. A lane reads KT keys at a time, in words of VE numbers; a warp reads the keys of HW heads; a thread adds
  // up values of HV heads, AHEAD words of which are on their way. NP: heads, rounded up to a power of two.
  constexpr int VE = 16 / sizeof(E), NP = NH > 8 ? 16 : NH > 4 ? 8 : NH > 2 ? 4 : NH;
  constexpr int HW = NP < 4 ? NP : 4, HV = NP < 8 ? NP : 8, AHEAD = 4;
  constexpr int MOST_KT = D / VE < 64 ? 8 : 8 / (D / VE / 32), FEW_KT = 2 * (D / VE) / HW;
  constexpr int KT = D / VE >= 32 || MOST_KT < FEW_KT ? MOST_KT : FEW_KT < 1 ? 1 : FEW_KT;
  constexpr int WARPS = THREADS / 32, CHUNKS = D / VE, LANES = CHUNKS < 32 ? CHUNKS : 32, CH = CHUNKS / LANES;
  constexpr int SUB = 32 / LANES, HG = NP / HW, KW = WARPS / HG, STEP = KT * SUB;  // keys a warp takes at once
  constexpr int SUMS = KT * HW, OWN = SUMS > LANES ? SUMS / LANES : 1, SHARE = LANES > SUMS ? LANES / SUMS : 1;
  constexpr int VALUES = HV * VE, TV = CHUNKS * (NP / HV), KG = THREADS / TV;
  constexpr int PIECE = VALUES > 32 ? 16 : VALUES > 1 ? VALUES / 2 : 1, WIDE = PIECE % 4 == 0 ? 4 : 1;
  constexpr int LEFT = VALUES > KG ? VALUES / KG : 1, COPIES = KG > VALUES ? KG / VALUES : 1;
  constexpr int AT_ONCE = LEFT % 4 == 0 ? 4 : 1, ONE = AT_ONCE / 4;
  constexpr int SCORES = MAX_KEYS * NH, OTHERS = PIECE * THREADS;
  __shared__ __align__(16) float room[SCORES > OTHERS ? SCORES : OTHERS];
  __shared__ float tops[NH], sums[NH];
  const float minus_infinity = __uint_as_float(0xff800000u), log2_e = 1.4426950408889634f;
  float* const score = room;  // then what groups of threads exchange
  float* const other = room;
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  let_next_kernel_begin();
  wait_for_kernel_before();
  const unsigned int kv_head = blockIdx.y % kv_heads, outer = blockIdx.y / kv_heads;
  const unsigned int batch = outer / queries, query = outer % queries;
  const unsigned int first = MASKED ? bounds[outer * RECORD] : 0u;
  const unsigned int count = MASKED ? bounds[outer * RECORD + 1u] : length;
  const Splits<D, false> split_of(count, kv_heads);
  const int per = split_of.per, splits = split_of.count;
  if ((int)blockIdx.x >= splits) return;
  const unsigned int keys_from = batch * key_batch + kv_head * key_head + first * key_stride;
  const unsigned int values_from = batch * value_batch + kv_head * value_head + first * value_stride;
  const unsigned int mask_from = batch * mask_batch + query * mask_query + first * mask_stride;

  const int group = warp % HG, sub = lane / LANES, within = lane % LANES;
  const unsigned int query_from = batch * query_batch + kv_head * query_kv + query * query_stride + within * VE;

  for (int split = blockIdx.x; split < splits; split += gridDim.x) {
    const int begin = split * per, keys = min(per, count - begin), end = max(keys - 1, 0);
    const unsigned int lane_keys = keys_from + begin * key_stride + within * VE;

    // The query: heads of this warp, dimensions of this lane. Each split reads it again: registers are for values.
    float q[HW][CH * VE];
    #pragma unroll
    for (int h = 0; h < HW; ++h)
      #pragma unroll
      for (int c = 0; c < CH; ++c) {
        const unsigned int line = query_from + min(group * HW + h, NH - 1) * query_head;
        const Word16 word = *(const Word16*)(query_at + line + c * LANES * VE);
        #pragma unroll
        for (int e = 0; e < VE; ++e) q[h][c * VE + e] = T::element(word, e);
      }
    // Scores.
    for (int base = warp / HG * STEP; base < keys; base += KW * STEP) {
      Word16 words[KT][CH];
      #pragma unroll
      for (int j = 0; j < KT; ++j) {
        const int key = min(base + j * SUB + sub, end);
        #pragma unroll
        for (int c = 0; c < CH; ++c)
          words[j][c] = *(const Word16*)(keys_at + (lane_keys + key * key_stride) + c * LANES * VE);
      }
      const int own = within / SHARE * OWN;  // a sum has the number key * HW + head
      M bits[OWN];
      if constexpr (MASKED)
        #pragma unroll
        for (int i = 0; i < OWN; ++i)
          bits[i] = mask_at[mask_from + (begin + min(base + (own + i) / HW * SUB + sub, end)) * mask_stride];
      float sum[SUMS];
      #pragma unroll
      for (int i = 0; i < SUMS; ++i) sum[i] = 0.0f;
      #pragma unroll
      for (int j = 0; j < KT; ++j)
        #pragma unroll
        for (int c = 0; c < CH; ++c) {
          const Word16 word = words[j][c];
          #pragma unroll
          for (int e = 0; e < VE; ++e) {
            const float k = T::element(word, e);
            #pragma unroll
            for (int h = 0; h < HW; ++h) sum[j * HW + h] = fmaf(q[h][c * VE + e], k, sum[j * HW + h]);
          }
        }
      // Lanes exchange halves of their sums, until each has the whole of its own.
      #pragma unroll
      for (int step = 1; step <= 5; ++step) {
        const int by = LANES >> step, left = SUMS >> step;
        if (by > 0 && left > 0) {
          const bool upper = (lane & by) != 0;
          #pragma unroll
          for (int i = 0; i < left; ++i) {
            const float low = sum[i], high = sum[left + i];
            sum[i] = (upper ? high : low) + __shfl_xor_sync(0xffffffffu, upper ? low : high, by);
          }
        } else if (by > 0) {
          sum[0] += __shfl_xor_sync(0xffffffffu, sum[0], by);
        }
      }
      if (within % SHARE == 0)
        #pragma unroll
        for (int i = 0; i < OWN; ++i) {
          const int key = base + (own + i) / HW * SUB + sub, head = group * HW + (own + i) % HW;
          if (key < keys && (NP == NH || head < NH)) score[key * NH + head] = masked<Mask>(sum[i], scale, bits[i]);
        }
    }

    // The first values are on their way before the others wait for the scores.
    const int place = thread % TV, chunk = place % CHUNKS, heads = place / CHUNKS * HV, set = thread / TV;
    const unsigned int mine = values_from + begin * value_stride + chunk * VE;
    Word16 words[AHEAD];
    #pragma unroll
    for (int j = 0; j < AHEAD; ++j) {
      const int key = min(set + j * KG, end);
      words[j] = load_once(values_at + (mine + key * value_stride));
    }
    __syncthreads();
    for (int head = warp; head < NH; head += WARPS) {
      float top = minus_infinity, sum = 0.0f;
      for (int key = lane; key < keys; key += 32) top = fmaxf(top, score[key * NH + head]);
      #pragma unroll
      for (int by = 16; by > 0; by >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, by));
      for (int key = lane; key < keys; key += 32) {
        const float x = score[key * NH + head];
        const float share = x == minus_infinity ? 0.0f : exp2f((x - top) * log2_e);
        score[key * NH + head] = share;
        sum += share;
      }
      #pragma unroll
      for (int by = 16; by > 0; by >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, by);
      if (lane == 0) tops[head] = top, sums[head] = sum;
    }
    __syncthreads();

    // Values: 16 bytes of a key for each thread, for its heads.
    float value[VALUES];
    #pragma unroll
    for (int i = 0; i < VALUES; ++i) value[i] = 0.0f;
    for (int base = set; base < keys; base += AHEAD * KG) {
      if (base != set)
        #pragma unroll
        for (int j = 0; j < AHEAD; ++j) {
          const int key = min(base + j * KG, end);
          words[j] = load_once(values_at + (mine + key * value_stride));
        }
      #pragma unroll
      for (int j = 0; j < AHEAD; ++j) {
        const int key = base + j * KG;
        if (key < keys) {
          float share[HV];
          #pragma unroll
          for (int h = 0; h < HV; ++h) share[h] = NP == NH || heads + h < NH ? score[key * NH + heads + h] : 0.0f;
          const Word16 word = words[j];
          #pragma unroll
          for (int e = 0; e < VE; ++e) {
            const float v = T::element(word, e);
            #pragma unroll
            for (int h = 0; h < HV; ++h) value[h * VE + e] = fmaf(share[h], v, value[h * VE + e]);
          }
        }
      }
    }
    // Groups of threads exchange halves of their values, until each has the whole of its own.
    int from = 0;
    __syncthreads();
    #pragma unroll
    for (int step = 1; step <= 8; ++step) {
      const int by = KG >> step, half = VALUES >> step, left = half > 0 ? half : 1;
      if (by > 0) {
        const bool upper = (set & by) != 0 && half > 0, lower = !upper && half > 0;
        if (upper) from += half;
        #pragma unroll
        for (int i = 0; i < left; i += PIECE) {
          #pragma unroll
          for (int j = 0; j < PIECE && j < left; ++j) {
            const float low = value[i + j], high = value[half + i + j];
            other[(j / WIDE * THREADS + thread) * WIDE + j % WIDE] = lower ? high : low;
            value[i + j] = upper ? high : low;
          }
          __syncthreads();
          #pragma unroll
          for (int j = 0; j < PIECE && j < left; ++j)
            value[i + j] += other[(j / WIDE * THREADS + (thread ^ by * TV)) * WIDE + j % WIDE];
          __syncthreads();
        }
      }
    }
    if (set % COPIES == 0)
      #pragma unroll
      for (int i = 0; i < LEFT; i += AT_ONCE) {
        const int head = heads + (from + i) / VE, at = head * D + chunk * VE + (from + i) % VE;
        if (NP != NH && head >= NH) continue;
        if (splits == 1) {
          const float sum = sums[head];
          #pragma unroll
          for (int j = 0; j < AT_ONCE; ++j)
            out[(outer * (unsigned long long)kv_heads + kv_head) * (NH * D) + at + j] =
              T::stored(sum == 0.0f ? 0.0f : value[i + j] / sum);
        } else {
          float* to = parts + (blockIdx.y * (unsigned long long)max_splits + split) * (NH * D) + at;
          if (AT_ONCE == 4)
            *(float4*)to = make_float4(value[i], value[i + ONE], value[i + 2 * ONE], value[i + 3 * ONE]);
          else
            to[0] = value[i];
        }
      }
    if (splits > 1 && thread < NH)
      of_splits[(blockIdx.y * (unsigned long long)max_splits + split) * NH + thread] =
        make_float2(tops[thread], sums[thread]);
    __syncthreads();
  }
  if constexpr (ADDS)
    add_up<T, D, NH, THREADS>(bounds, parts, of_splits, out, kv_heads, max_splits, outer, kv_head, splits, sums);
}

// Grid: slices of the results of a key-value head, then (batch, query, key-value head). Each of 32 groups of threads
// has every 32nd split.
template <typename T, typename Mask, int D, int NH, bool TENSOR, int THREADS>
__global__ void __launch_bounds__(THREADS) sum(const float* parts, const float2* of_splits, const unsigned int* bounds,
  typename T::Stored* out, unsigned int kv_heads, unsigned int max_splits, unsigned int length) {
  constexpr bool MASKED = !Same<Mask, None>::value;
  constexpr int LINE = THREADS / 32, WARPS = THREADS / 32, AHEAD = 8;
  __shared__ float weights[MANY], tops[WARPS], sums[WARPS];
  __shared__ float4 groups[THREADS];
  const float minus_infinity = __uint_as_float(0xff800000u), log2_e = 1.4426950408889634f;
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, set = thread / LINE;
  let_next_kernel_begin();
  wait_for_kernel_before();
  const unsigned int outer = blockIdx.y / kv_heads;
  const unsigned int count = MASKED ? bounds[outer * RECORD + 1u] : length;
  const Splits<D, TENSOR> split_of(count, kv_heads);
  const int splits = split_of.count;
  if (splits == 1) return;  // it is written
  const int at = blockIdx.x * LINE * 4, head = at / D;
  const float2* known = of_splits + blockIdx.y * (unsigned long long)max_splits * NH + head;
  const float* line = parts + blockIdx.y * (unsigned long long)max_splits * (NH * D) + at + thread % LINE * 4;
  auto read_part = [&](int split) { return *(const float4*)(line + split * (unsigned long long)(NH * D)); };
  float4 part[AHEAD];  // on their way while weights are computed
  #pragma unroll
  for (int i = 0; i < AHEAD; ++i)
    if (set + i * 32 < splits) part[i] = read_part(set + i * 32);
  float top = minus_infinity, sum = 0.0f;
  for (int split = thread; split < splits; split += THREADS) top = fmaxf(top, known[split * NH].x);
  #pragma unroll
  for (int by = 16; by > 0; by >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, by));
  if (lane == 0) tops[warp] = top;
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < WARPS; ++i) top = fmaxf(top, tops[i]);
  for (int split = thread; split < splits; split += THREADS) {
    const float2 one = known[split * NH];
    const float weight = one.x == minus_infinity ? 0.0f : exp2f((one.x - top) * log2_e);
    weights[split] = weight;
    sum = __fadd_rn(sum, __fmul_rn(weight, one.y));
  }
  #pragma unroll
  for (int by = 16; by > 0; by >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, by);
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  sum = sums[0];
  #pragma unroll
  for (int i = 1; i < WARPS; ++i) sum += sums[i];
  float4 group = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for (int base = set; base < splits; base += AHEAD * 32)
    #pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int split = base + i * 32;
      if (split >= splits) break;
      const float weight = weights[split];
      group.x = __fadd_rn(group.x, __fmul_rn(weight, part[i].x));
      group.y = __fadd_rn(group.y, __fmul_rn(weight, part[i].y));
      group.z = __fadd_rn(group.z, __fmul_rn(weight, part[i].z));
      group.w = __fadd_rn(group.w, __fmul_rn(weight, part[i].w));
      if (split + AHEAD * 32 < splits) part[i] = read_part(split + AHEAD * 32);
    }
  groups[thread] = group;
  __syncthreads();
  if (thread >= LINE * 4) return;
  const float* const of_groups = (const float*)groups + thread;
  float whole = of_groups[0];
  #pragma unroll
  for (int g = 1; g < 32; ++g) whole += of_groups[g * LINE * 4];
  out[blockIdx.y * (unsigned long long)(NH * D) + at + thread] = T::stored(sum == 0.0f ? 0.0f : whole / sum);
}
}  // namespace attention
