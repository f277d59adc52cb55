// The best words of a head, from half of its bytes: which words can be among the k best, and the logits of only those.
//
// Launched by specs/head.py, which says how. Test: tests/unit/kernels/test_head.py, against the whole head.
//
// `copied` makes a copy of the head in 8 bits. In a step, `given` prepares the hidden state, `scores` bounds the logit
// of each word from below and above, `least` finds the k-th largest lower bound, and `chosen` computes the words whose
// upper bound reaches it from the head itself, as dense::large does. If a bound is not finite, those are all words.
#pragma once
#include "prelude.cuh"
#include "dense.cuh"
#include "tensor_cores.cuh"

namespace head {
enum { THREADS = 256, WARPS = THREADS / 32, WARP_ROWS = 4, BYTES = 16, CHUNK = 64 };
enum { STEPS = 127, HALF = 128, MOST = STEPS * HALF };  // a hidden state is high * HALF + low
enum { SELECTING = 1024 };  // threads of `least`
static __device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }
static __device__ __forceinline__ float size_of(float x) { return fabsf(x) <= 3.0e38f ? fabsf(x) : infinity(); }
static __device__ __forceinline__ float clamped(float x, float most) { return fminf(fmaxf(x, -most), most); }

template <int LANES = 32>
__device__ __forceinline__ float summed(float x) {
  #pragma unroll
  for (int with = LANES / 2; with; with >>= 1) x += __shfl_xor_sync(~0u, x, with);
  return x;
}
template <int LANES = 32>
__device__ __forceinline__ float largest(float x) {
  #pragma unroll
  for (int with = LANES / 2; with; with >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, with));
  return x;
}

// What the model makes of a logit, at most (UP = 1) or at least (-1): rounded to its dtype, divided by `cap`, tanh, times
// `cap`. A device may divide by multiplying, and its tanh need not be monotone in the last bits.
template <typename T, int UP>
__device__ __forceinline__ float edge(float x, float cap) {
  constexpr float SLACK = UP * 1.0e-6f;
  x = T::rounded(x);
  if (cap > 0.0f) {
    x = __fdiv_rn(x, cap);
    x = tanhf(T::rounded(x + fabsf(x) * SLACK));
    x = T::rounded(x + fabsf(x) * SLACK) * cap;
    x = T::rounded(x + fabsf(x) * SLACK);
  }
  return x;
}

// A warp copies a row. Scale and norm of the residual of each group are float16, in one word. The norm is an upper bound.
template <typename T, int INPUTS, int GROUP>
__global__ void __launch_bounds__(THREADS) copied(const typename T::Stored* __restrict__ weight,
    Word16* __restrict__ bytes, unsigned int* __restrict__ scales, float* __restrict__ sizes, unsigned int words) {
  constexpr int LANES = GROUP / BYTES;
  const unsigned int lane = threadIdx.x & 31u, row = blockIdx.x * WARPS + (threadIdx.x >> 5);
  wait_for_kernel_before();
  if (row >= words) return;
  const typename T::Stored* const from = weight + (unsigned long long)row * INPUTS;
  float whole = 0.0f, lost = 0.0f;
  for (unsigned int at = lane; at - lane < INPUTS / BYTES; at += 32u) {
    const bool there = at < INPUTS / BYTES;
    float x[BYTES], most = 0.0f, squares = 0.0f, residual = 0.0f;
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
      Word16 word = {{0u, 0u, 0u, 0u}};
      if (there) word = load_once((const Word16*)from + 2u * at + half);
      #pragma unroll
      for (int k = 0; k < 8; ++k) x[8 * half + k] = T::element(word, k);
    }
    #pragma unroll
    for (int k = 0; k < BYTES; ++k) {
      most = fmaxf(most, size_of(x[k]));
      squares = __fmaf_rn(x[k], x[k], squares);
    }
    const unsigned int bits = to_f16(fmaxf(largest<LANES>(most) / STEPS, 6.0e-8f));
    const float scale = from_f16((u16)bits), inverse = 1.0f / scale;
    Word16 word = {{0u, 0u, 0u, 0u}};
    #pragma unroll
    for (int k = 0; k < BYTES; ++k) {
      const float steps = clamped(rintf(x[k] * inverse), STEPS);
      const float left = __fmaf_rn(-steps, scale, x[k]);
      residual = __fmaf_rn(left, left, residual);
      word.part[k / 4] |= ((unsigned int)(int)steps & 255u) << (k % 4 * 8);
    }
    residual = summed<LANES>(residual);
    if (there) {
      bytes[(unsigned long long)row * (INPUTS / BYTES) + at] = word;
      if (at % LANES == 0u) {
        const unsigned int norm = to_f16(sqrtf(residual) * 1.001f + 6.0e-8f);
        scales[(unsigned long long)row * (INPUTS / GROUP) + at / LANES] = bits | norm << 16;
        lost += residual;
      }
      whole += squares;
    }
  }
  whole = summed(whole), lost = summed(lost);
  if (lane == 0u) sizes[row] = (sqrtf(whole) + sqrtf(lost)) * 1.001f + 1.0e-15f;
}

// A block prepares a row of hidden states: in 15 bits, high and low. Of each group the step, and the norm for one of its
// lanes. `slack`, for each unit of a row's size, is what the rest of the hidden state and roundings may change: those of
// `scores` or `many_scores`, and of the sums of dense::large. ROWS: for `many_scores`, in whose order it writes; else 0.
template <typename T, int INPUTS, int GROUP, int ROWS>
__global__ void __launch_bounds__(THREADS) given(const typename T::Stored* input,
    signed char* __restrict__ high, signed char* __restrict__ low, float2* __restrict__ groups,
    float* __restrict__ slack) {
  constexpr int GROUPS = INPUTS / GROUP, EACH = (GROUP + 31) / 32;
  constexpr int ROUNDINGS = (INPUTS + 31) / 32 + GROUPS + 24;
  constexpr float SHARES = ROWS ? 1.0f : (float)GROUP / BYTES;  // of a norm: `scores` adds one for each lane
  __shared__ float of_warps[2][WARPS];
  const unsigned int lane = threadIdx.x & 31u, warp = threadIdx.x >> 5;
  const unsigned int eight = blockIdx.x / 8u, own = blockIdx.x % 8u;
  input += (ROWS ? min(blockIdx.x, ROWS - 1u) : blockIdx.x) * INPUTS;
  let_next_kernel_begin();
  wait_for_kernel_before();
  float whole = 0.0f, lost = 0.0f;
  for (unsigned int group = warp; group < GROUPS; group += WARPS) {
    float x[EACH], most = 0.0f, squares = 0.0f, residual = 0.0f;
    #pragma unroll
    for (int k = 0; k < EACH; ++k) {
      const unsigned int at = k * 32u + lane;
      x[k] = at < GROUP ? T::load(input[group * GROUP + at]) : 0.0f;
      most = fmaxf(most, size_of(x[k]));
      squares = __fmaf_rn(x[k], x[k], squares);
    }
    const float step = fmaxf(largest(most), 1.0e-30f) / MOST;
    #pragma unroll
    for (int k = 0; k < EACH; ++k) {
      const unsigned int at = k * 32u + lane;
      if (at >= GROUP) continue;
      const float steps = clamped(rintf(__fdiv_rn(x[k], step)), MOST);
      const int number = (int)steps, upper = (number + HALF / 2) >> 7;
      unsigned int to = group * GROUP + at;
      if (ROWS) to = ((eight * (INPUTS / CHUNK) + to / CHUNK) * 8u + own) * CHUNK + to % CHUNK;
      else to += blockIdx.x * INPUTS;
      high[to] = (signed char)upper;
      low[to] = (signed char)(number - upper * HALF);
      const float left = __fmaf_rn(-steps, step, x[k]);
      residual = __fmaf_rn(left, left, residual);
    }
    squares = summed(squares), residual = summed(residual);
    if (lane == 0u)
      groups[ROWS ? (eight * GROUPS + group) * 8u + own : blockIdx.x * GROUPS + group] = {
          step, (sqrtf(squares) * 1.001f + 1.0e-15f) / SHARES};
    whole += squares, lost += residual;
  }
  if (lane == 0u) of_warps[0][warp] = whole, of_warps[1][warp] = lost;
  __syncthreads();
  if (threadIdx.x != 0u) return;
  whole = lost = 0.0f;
  for (int other = 0; other < WARPS; ++other) whole += of_warps[0][other], lost += of_warps[1][other];
  whole = sqrtf(whole) * 1.001f + 1.0e-15f, lost = sqrtf(lost) * 1.001f + 1.0e-15f;
  slack[blockIdx.x] = (lost + ROUNDINGS * 6.2e-8f * (whole + lost)) * 1.001f;
}

// The words of four bytes of a row of the copy times those of each row of hidden states.
template <int INPUTS, int GROUP, int M = 0, int ROWS>
__device__ __forceinline__ void add(float (&sums)[WARP_ROWS][ROWS], float (&bounds)[WARP_ROWS][ROWS],
    const Word16* high, const Word16* low, const float2* groups, unsigned int at, const Word16 (&w)[WARP_ROWS],
    const unsigned int (&s)[WARP_ROWS]) {
  const Word16 upper = high[M * (INPUTS / BYTES) + at], lower = low[M * (INPUTS / BYTES) + at];
  const float2 group = groups[M * (INPUTS / GROUP) + at / (GROUP / BYTES)];
  #pragma unroll
  for (int r = 0; r < WARP_ROWS; ++r) {
    int more = 0, less = 0;
    #pragma unroll
    for (int part = 0; part < 4; ++part) {
      more = add_bytes(w[r].part[part], upper.part[part], more);
      less = add_bytes(w[r].part[part], lower.part[part], less);
    }
    sums[r][M] = __fmaf_rn(from_f16((u16)s[r]) * group.x, (float)(more * HALF + less), sums[r][M]);
    bounds[r][M] = __fmaf_rn(from_f16((u16)(s[r] >> 16)), group.y, bounds[r][M]);
  }
  if constexpr (M + 1 < ROWS) add<INPUTS, GROUP, M + 1>(sums, bounds, high, low, groups, at, w, s);
}

// Upper and lower bound of a logit, from a score and a bound for what it is off.
__device__ __forceinline__ float2 around(float score, float bound, float size, float slack) {
  bound = __fmaf_rn(size, slack, bound * 1.00001f + 1.0e-30f) * 1.00001f;
  const float above = score + bound, below = score - bound;
  return {above + fabsf(above) * 2.5e-7f, below - fabsf(below) * 2.5e-7f};
}

// A warp takes four words, as in dense::large. Writes the upper bound of each, and of each block the largest lower one.
template <typename T, int ROWS, int INPUTS, int GROUP>
__global__ void __launch_bounds__(THREADS) scores(const Word16* __restrict__ bytes,
    const unsigned int* __restrict__ scales, const float* __restrict__ sizes, const Word16* high, const Word16* low,
    const float2* groups, const float* slack,
    typename T::Stored* __restrict__ upper, typename T::Stored* __restrict__ best, unsigned int words, float cap) {
  constexpr int WORDS = INPUTS / BYTES, TURNS = (WORDS + 31) / 32, GROUPS = INPUTS / GROUP, LANES = GROUP / BYTES;
  __shared__ float of_words[ROWS][WARPS * WARP_ROWS];
  const unsigned int lane = threadIdx.x & 31u, warp = threadIdx.x >> 5;
  const unsigned int first = (blockIdx.x * WARPS + warp) * WARP_ROWS;
  const unsigned int rows = first < words ? min((unsigned int)WARP_ROWS, words - first) : 0u;
  const Word16* const own = bytes + (unsigned long long)first * WORDS;
  const unsigned int* const scale = scales + (unsigned long long)first * GROUPS;
  float sums[WARP_ROWS][ROWS], bounds[WARP_ROWS][ROWS];
  Word16 w[WARP_ROWS];
  unsigned int s[WARP_ROWS];
  #pragma unroll
  for (int r = 0; r < WARP_ROWS; ++r) {
    #pragma unroll
    for (int m = 0; m < ROWS; ++m) sums[r][m] = bounds[r][m] = 0.0f;
    if (r < rows && lane < WORDS) w[r] = load_once(own + r * WORDS + lane), s[r] = scale[r * GROUPS + lane / LANES];
  }
  let_next_kernel_begin();
  wait_for_kernel_before();
  #pragma unroll (TURNS < 8 ? TURNS : 8)
  for (int turn = 0; turn < TURNS; ++turn) {
    const unsigned int at = lane + turn * 32u, next = at + 32u;
    Word16 ahead[WARP_ROWS];
    unsigned int also[WARP_ROWS];
    #pragma unroll
    for (int r = 0; r < WARP_ROWS; ++r)
      if (r < rows && next < WORDS)
        ahead[r] = load_once(own + r * WORDS + next), also[r] = scale[r * GROUPS + next / LANES];
    if (at < WORDS) add<INPUTS, GROUP>(sums, bounds, high, low, groups, at, w, s);
    #pragma unroll
    for (int r = 0; r < WARP_ROWS; ++r) w[r] = ahead[r], s[r] = also[r];
  }
  // Each sum is for one lane.
  float score = 0.0f, bound = 0.0f, most = -infinity();
  #pragma unroll
  for (int r = 0; r < WARP_ROWS; ++r)
    #pragma unroll
    for (int m = 0; m < ROWS; ++m) {
      const float sum = summed(sums[r][m]), most_of_sum = summed(bounds[r][m]);
      if (lane == r * ROWS + m) score = sum, bound = most_of_sum;
    }
  const unsigned int r = lane / ROWS, m = lane % ROWS;
  if (r < rows) {
    const float2 bounds = around(score, bound, sizes[first + r], slack[m]);
    upper[(unsigned long long)m * words + first + r] = T::stored(edge<T, 1>(bounds.x, cap));
    most = edge<T, -1>(bounds.y, cap);
    if (!(most < infinity())) most = infinity();
  }
  if (r < WARP_ROWS) of_words[m][warp * WARP_ROWS + r] = most;
  __syncthreads();
  if (warp >= ROWS) return;
  most = largest(of_words[warp][lane]);
  if (lane == 0u) best[warp * gridDim.x + blockIdx.x] = T::stored(most);
}

// The same for more than eight hidden states, by tensor cores. A warp takes 16 words, then 16 more, and multiplies what
// it reads of the copy by up to 32 hidden states.
template <typename T, int ROWS, int INPUTS, int GROUP>
__global__ void __launch_bounds__(THREADS, 2) many_scores(const Word16* __restrict__ bytes,
    const unsigned int* __restrict__ scales, const float* __restrict__ sizes, const Word16* high, const Word16* low,
    const float4* groups, const float* slack,
    typename T::Stored* __restrict__ upper, typename T::Stored* __restrict__ best, unsigned int words, float cap) {
  using Eights = Eights<ROWS>;
  constexpr int WORDS = INPUTS / BYTES, GROUPS = INPUTS / GROUP, CHUNKS = GROUP / CHUNK, EACH = Eights::EACH;
  const unsigned int lane = threadIdx.x & 31u, row = lane >> 2, col = lane & 3u;
  const unsigned int tile = blockIdx.x / Eights::PARTS * WARPS + (threadIdx.x >> 5);
  const unsigned int eight = blockIdx.x % Eights::PARTS * EACH;
  Word16 w[CHUNKS][2], ahead[CHUNKS][2];
  unsigned int s[2], also[2];
  // Group number `group` of the first 16 words; after those come the groups of the others.
  auto load = [&](int group, Word16 (&to)[CHUNKS][2], unsigned int (&scale)[2]) {
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      const unsigned int word = min(tile * 32u + group / GROUPS * 16u + r * 8u + row, words - 1u);
      #pragma unroll
      for (int c = 0; c < CHUNKS; ++c)
        to[c][r] = load_once(bytes + (unsigned long long)word * WORDS + (group % GROUPS * CHUNKS + c) * 4 + col);
      scale[r] = scales[(unsigned long long)word * GROUPS + group % GROUPS];
    }
  };
  load(0, w, s);
  let_next_kernel_begin();
  wait_for_kernel_before();
  float most[EACH][2];
  #pragma unroll
  for (int t = 0; t < EACH; ++t) most[t][0] = most[t][1] = -infinity();
  #pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    float sums[EACH][4], bounds[EACH][4];
    #pragma unroll
    for (int i = 0; i < EACH * 4; ++i) sums[i / 4][i % 4] = bounds[i / 4][i % 4] = 0.0f;
    #pragma unroll 1
    for (int group = 0; group < GROUPS; ++group) {
      load(min(half * GROUPS + group + 1, 2 * GROUPS - 1), ahead, also);
      #pragma unroll
      for (int t = 0; t < EACH; ++t) {
        int more[4] = {0, 0, 0, 0}, less[4] = {0, 0, 0, 0};
        #pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
          const unsigned int at = (((eight + t) * GROUPS + group) * CHUNKS + c) * 32u + lane;
          const Word16 x = high[at], y = low[at], &a = w[c][0], &b = w[c][1];
          #pragma unroll
          for (int k = 0; k < 4; k += 2) {
            multiply_bytes(more, a.part[k], b.part[k], a.part[k + 1], b.part[k + 1], x.part[k], x.part[k + 1]);
            multiply_bytes(less, a.part[k], b.part[k], a.part[k + 1], b.part[k + 1], y.part[k], y.part[k + 1]);
          }
        }
        const float4 of_rows = groups[((eight + t) * GROUPS + group) * 4u + col];  // step and norm of two
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float step = i % 2 ? of_rows.z : of_rows.x, norm = i % 2 ? of_rows.w : of_rows.y;
          const float number = (float)(more[i] * HALF + less[i]);
          sums[t][i] = __fmaf_rn(from_f16((u16)s[i / 2]) * step, number, sums[t][i]);
          bounds[t][i] = __fmaf_rn(from_f16((u16)(s[i / 2] >> 16)), norm, bounds[t][i]);
        }
      }
      #pragma unroll
      for (int r = 0; r < 2; ++r) {
        #pragma unroll
        for (int c = 0; c < CHUNKS; ++c) w[c][r] = ahead[c][r];
        s[r] = also[r];
      }
    }
    #pragma unroll
    for (int r = 0; r < 2; ++r) {
      const unsigned int word = tile * 32u + half * 16u + r * 8u + row;
      const float size = word < words ? sizes[word] : 0.0f;
      #pragma unroll
      for (int i = 0; i < EACH * 2; ++i) {
        const unsigned int t = i / 2, odd = i % 2, m = (eight + t) * 8u + col * 2u + odd;
        const float2 edges = around(sums[t][r * 2 + odd], bounds[t][r * 2 + odd], size, slack[m]);
        if (word >= words) continue;
        if (m < ROWS) upper[(unsigned long long)m * words + word] = T::stored(edge<T, 1>(edges.x, cap));
        most[t][odd] = fmaxf(most[t][odd], edges.y < infinity() ? edges.y : infinity());
      }
    }
  }
  #pragma unroll
  for (int i = 0; i < EACH * 2; ++i) {
    const unsigned int m = (eight + i / 2) * 8u + col * 2u + i % 2;
    float one = most[i / 2][i % 2];
    #pragma unroll
    for (int with = 4; with < 32; with *= 2) one = fmaxf(one, __shfl_xor_sync(~0u, one, with));
    one = one < infinity() ? edge<T, -1>(one, cap) : infinity();
    if (row == 0u && m < ROWS && tile * 32u < words) best[m * ((words + 31u) / 32u) + tile] = T::stored(one);
  }
}

// The k-th largest of a row of lower bounds, bit by bit: k words are not below it. -inf if there are fewer, or if one of
// them is not finite.
template <typename T, int EACH>
__global__ void __launch_bounds__(SELECTING) least(const typename T::Stored* best,
    float* __restrict__ reached, unsigned int blocks, unsigned int k) {
  __shared__ unsigned int sums[2][32], is_odd;
  const unsigned int lane = threadIdx.x & 31u, warp = threadIdx.x >> 5;
  unsigned int keys[EACH], cut = 0u;
  if (threadIdx.x == 0u) is_odd = 0u;
  let_next_kernel_begin();
  wait_for_kernel_before();
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const unsigned int at = i * SELECTING + threadIdx.x;
    const unsigned int bits = at < blocks ? best[blockIdx.x * blocks + at] : 0xffffu;
    if (at < blocks && T::load((u16)bits) == infinity()) is_odd = 1u;
    keys[i] = bits & 0x8000u ? ~bits & 0xffffu : bits | 0x8000u;  // in their order; 0 for none
  }
  for (unsigned int bit = 0x8000u, turn = 0u; bit; bit >>= 1, turn ^= 1u) {
    unsigned int found = 0u, all = 0u;
    #pragma unroll
    for (int i = 0; i < EACH; ++i) found += keys[i] >= (cut | bit);
    for (unsigned int with = 16u; with; with >>= 1) found += __shfl_xor_sync(~0u, found, with);
    if (lane == 0u) sums[turn][warp] = found;
    __syncthreads();
    all = sums[turn][lane];
    for (unsigned int with = 16u; with; with >>= 1) all += __shfl_xor_sync(~0u, all, with);
    if (all >= k) cut |= bit;
  }
  if (threadIdx.x != 0u) return;
  const unsigned int bits = cut & 0x8000u ? cut & 0x7fffu : ~cut & 0xffffu;
  const float found = T::load((u16)bits);
  reached[blockIdx.x] = found == found && is_odd == 0u ? found : -infinity();
}

// A warp takes 32 words: those that reach the bound get the bits of dense::large, the others -inf.
template <typename T, int INPUTS>
__global__ void __launch_bounds__(THREADS) chosen(const typename T::Stored* input,
    const typename T::Stored* __restrict__ weight, const typename T::Stored* upper, const float* reached, typename T::Stored* __restrict__ output, unsigned long long* counts,
    unsigned int words) {
  constexpr int WORDS = INPUTS / T::IN_WORD, TURNS = (WORDS + 31) / 32, AT_ONCE = 8;
  const unsigned int lane = threadIdx.x & 31u, first = (blockIdx.x * WARPS + (threadIdx.x >> 5)) * 32u;
  const unsigned long long row = (unsigned long long)blockIdx.y * words;
  let_next_kernel_begin();
  wait_for_kernel_before();
  const bool is_chosen = first + lane < words && !(T::load(upper[row + first + lane]) < reached[blockIdx.y]);
  const unsigned int all = __ballot_sync(~0u, is_chosen);
  float logit = -infinity();
  for (unsigned int left = all; left; left &= left - 1u) {
    const unsigned int word = __popc((left & (~left + 1u)) - 1u);
    float sums[1] = {0.0f};
    #pragma unroll 1
    for (int begin = 0; begin < TURNS; begin += AT_ONCE) {
      Word16 w[AT_ONCE];
      #pragma unroll
      for (int turn = 0; turn < AT_ONCE; ++turn) {
        const unsigned int at = lane + (begin + turn) * 32u;
        if (at < WORDS) w[turn] = dense::word<T, INPUTS, true>(weight, first + word, at);
      }
      #pragma unroll
      for (int turn = 0; turn < AT_ONCE; ++turn) {
        const unsigned int at = lane + (begin + turn) * 32u;
        if (at < WORDS) dense::add<T, T, INPUTS, true>(sums, input + blockIdx.y * INPUTS, at, w[turn]);
      }
    }
    dense::over_lanes(sums[0]);
    if (lane == word) logit = sums[0];
  }
  if (first + lane < words) output[row + first + lane] = T::stored(logit);
  if (lane == 0u && all) atomicAdd(counts, (unsigned long long)__popc(all));
  if (threadIdx.x == 0u && blockIdx.x == 0u) atomicAdd(counts + 1, 1ull);
}
}  // namespace head
