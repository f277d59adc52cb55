"""Attention of 16-bit numbers by matrix units: the same parts as :data:`attention_source.ATTENTION`.

Products of 16-bit numbers are exact, and sums are in ``float``. A share of the softmax is the sum of two 16-bit
numbers, so it is off by 2 ** -17 of itself at most (bfloat16; less in float16).

A matrix unit multiplies 16 rows of 16 numbers by 8 columns: rows are keys, or dimensions of values; columns are heads.
Every lane reads words of 16 bytes, and what it reads is what it must hand over, in an order that is the same for both
factors. Scores: a quarter of a key's dimensions for each warp. Values: 64 dimensions for each warp.
"""

from __future__ import annotations

from typing import Any

from gemma4_compat._kernels.programs import kinds
from gemma4_compat._kernels.specs.attention_source import START

ATTENTION = (
    r"""extern "C" __global__ void __launch_bounds__(@THREADS@@RESIDENT@) attention(@PARAMETERS@) {
@CONSTANTS@
  constexpr int WARPS = THREADS / 32, QUARTERS = D / 32 < 4 ? D / 32 : 4, STEPS = D / 32 / QUARTERS;
  constexpr int KEY_STEP = WARPS / QUARTERS * 16, SLICES = D / 64, SETS = WARPS / SLICES, VALUE_STEP = SETS * 16;
  constexpr int COLUMNS = NT * 8, LINE = MAX_KEYS + 4, SHARES = MAX_KEYS / 4 + 4;  // without bank conflicts
  constexpr int SCORES = QUARTERS * COLUMNS * LINE, OTHERS = (SETS - 1) * NT * 16 * SLICES * 32;
  __shared__ __align__(16) float room[SCORES > OTHERS ? SCORES : OTHERS];
  __shared__ uint4 shares[COLUMNS * SHARES];
  __shared__ float tops[NH], sums[NH], factors[NH];
  const float minus_infinity = __uint_as_float(0xff800000u), log2_e = 1.4426950408889634f;
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, row = lane >> 2, col = lane & 3;
  // c += a * b
  auto multiply = [&](float (&c)[4], unsigned int a0, unsigned int a1, unsigned int a2, unsigned int a3,
      unsigned int b0, unsigned int b1) {
@MULTIPLY@
  };
"""
    + START
    + r"""  const int quarter = warp % QUARTERS, key_begin = warp / QUARTERS * 16;
  const int slice = warp % SLICES, set = warp / SLICES;
  const @T@* const query_line = query_at + batch * query_batch + kv_head * query_kv + query * query_stride;
  const char* const keys_line = (const char*)(keys_at + batch * key_batch + kv_head * key_head);
  const char* const values_line = (const char*)(values_at + batch * value_batch + kv_head * value_head);
  const unsigned int keys_from = (quarter * STEPS * 32 + col * 8) * 2u, values_from = (slice * 64 + row * 8) * 2u;
  @MASK_LINE@
  // A long query is read again where it is needed: registers are for keys and values.
  constexpr bool KEPT = NT * STEPS <= 2;
  auto read_query = [&](int t, int s) {
    const @T@* at = query_line + (min(t * 8 + row, NH - 1) * query_head + (quarter * STEPS + s) * 32 + col * 8);
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
    @MASK_LOADS@

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
              multiply(one, low.part[0], high.part[0], low.part[1], high.part[1], by.part[0], by.part[1]);
              multiply(two, low.part[2], high.part[2], low.part[3], high.part[3], by.part[2], by.part[3]);
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
        share[i] = lane * 4 + i < keys ? @MASKED@ : minus_infinity;
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
        less[i] = share[i] - @ROUNDED@;
      }
      #pragma unroll
      for (int by = 16; by > 0; by >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, by);
      if (lane == 0) {
        const float factor = before == minus_infinity ? 0.0f : exp2f((before - top) * log2_e);
        sums[head] = done ? fmaf(sums[head], factor, sum) : sum;
        tops[head] = top;
        factors[head] = factor;
      }
      shares[head * SHARES + lane] = make_uint4(@PAIR@(share[0], share[1]), @PAIR@(share[2], share[3]),
        @PAIR@(less[0], less[1]), @PAIR@(less[2], less[3]));
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
              multiply(value[t][m], a0, a1, a2, a3, by[t].z, by[t].w);
              multiply(value[t][m], a0, a1, a2, a3, by[t].x, by[t].y);
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
          word.part[m] = sum == 0.0f ? 0u : @PAIR@(value[t][m][h] / sum, value[t][m][2 + h] / sum);
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
@LAST@
}
"""
)

_MULTIPLY = r"""#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.@NAME@.@NAME@.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#elif defined(__CUDA_ARCH__) && @HALF@
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(b0));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a2), "r"(a3), "r"(b1));
#else
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
          c[i] = fmaf(@A_LOW@, @B_LOW@, c[i]);
          c[i] = fmaf(@A_HIGH@, @B_HIGH@, c[i]);
        }
      }
#endif"""


def multiplication(dtype: Any) -> str:
    """C for ``c += a * b``: by the matrix units, or where there are none for the dtype, by each lane, which computes
    four numbers of the result.

    Args:
        dtype: of ``a0`` to ``a3``, ``b0`` and ``b1``: pairs of bfloat16 or float16 numbers. ``c`` has four floats.
    """
    load = kinds()[dtype].load
    half = load.startswith("from_f16")
    text = _MULTIPLY.replace("@HALF@", str(int(half))).replace("@NAME@", "f16" if half else "bf16")
    for name in "AB":
        text = text.replace(f"@{name}_LOW@", load.format(f"(u16){name.lower()}[k]"))
        text = text.replace(f"@{name}_HIGH@", load.format(f"(u16)({name.lower()}[k] >> 16)"))
    return text
