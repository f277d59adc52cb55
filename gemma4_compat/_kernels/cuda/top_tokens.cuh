// Top-k and top-p, which Gemma's defaults ask for: the scores that are left of a row, and a token drawn from them.
//
// Launched by match/top_tokens.py, which says how. Test: tests/unit/kernels/test_top_tokens.py, against transformers.
//
// Kernels, in order: `maxima` finds the largest score of each group of a row; `largest` the k-th largest score, those
// that are not below it, and their probabilities; `kept` writes the scores that top-p leaves; `drawn` draws a token.
#pragma once
#include "prelude.cuh"

namespace top_tokens {
// Of `left`: no score was removed, because the k-th largest is NaN, which no score is less than.
enum : unsigned int { ALL = 0xffffffffu };

// Unsigned integers in the order of torch.topk: NaN is the largest, both zeros are equal.
__device__ __forceinline__ unsigned int key_of(float x) {
  const unsigned int bits = x == 0.0f ? 0u : __float_as_uint(x);
  return x != x ? 0xffffffffu : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The sum of a block, in the order of cuda_utils::BlockReduce; only the first thread has it.
__device__ __forceinline__ float summed(float x, float* of_warps, const unsigned int& thread,
  const unsigned int& lane, const unsigned int& warp) {
  for (unsigned int by = 16u; by; by >>= 1) x = __fadd_rn(x, __shfl_down_sync(~0u, x, by));
  if (lane == 0u) of_warps[warp] = x;
  __syncthreads();
  x = thread < blockDim.x >> 5 ? of_warps[lane] : 0.0f;
  if (warp == 0u)
    for (unsigned int by = 16u; by; by >>= 1) x = __fadd_rn(x, __shfl_down_sync(~0u, x, by));
  return x;
}

template <int THREADS>
__global__ void __launch_bounds__(THREADS) maxima(const float* __restrict__ scores,
  unsigned int* largest, float* probabilities, float* result, unsigned int vocabulary, unsigned int size,
  unsigned int groups) {
  const unsigned int lane = threadIdx.x & 31u;
  const unsigned int group = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
  if (group >= groups) return;
  const unsigned long long row = (unsigned long long)blockIdx.y * vocabulary;
  const unsigned int end = min((group + 1u) * size, vocabulary);
  unsigned int found = 0u;
  #pragma unroll 8
  for (unsigned int at = group * size + lane; at < end; at += 32u) {
    found = max(found, key_of(scores[row + at]));
    probabilities[row + at] = 0.0f;
    result[row + at] = __uint_as_float(0xff800000u);
  }
  for (unsigned int with = 16u; with; with >>= 1) found = max(found, __shfl_xor_sync(~0u, found, with));
  if (lane == 0u) largest[blockIdx.y * groups + group] = found;
}

template <int THREADS, unsigned int ROOM>
__global__ void __launch_bounds__(THREADS) largest(const float* __restrict__ scores,
  const unsigned int* __restrict__ of_groups, float* probabilities, unsigned int* order, float* ascending,
  unsigned int* left, unsigned int vocabulary, unsigned int size, unsigned int groups, unsigned int k) {
  constexpr unsigned int FINITE = 0x00800000u;  // -inf has the key before
  __shared__ unsigned int tops[THREADS], keys[ROOM], places[ROOM], sums[32], count, bound;
  __shared__ float of_warps[32], whole;
  const unsigned int thread = threadIdx.x, lane = thread & 31u, warp = thread >> 5;
  const unsigned long long row = (unsigned long long)blockIdx.x * vocabulary;
  auto note = [&](unsigned int key, unsigned int at) {
    const unsigned int place = atomicAdd(&count, 1u);
    if (place < ROOM) keys[place] = key, places[place] = at;
  };
  // How many threads before this one say yes, and how many of all.
  auto before = [&](bool yes, unsigned int& all) -> unsigned int {
    const unsigned int votes = __ballot_sync(~0u, yes);
    if (lane == 0u) sums[warp] = __popc(votes);
    __syncthreads();
    unsigned int found = __popc(votes & ((1u << lane) - 1u));
    all = 0u;
    for (unsigned int other = 0u; other < blockDim.x >> 5; ++other) {
      if (other < warp) found += sums[other];
      all += sums[other];
    }
    __syncthreads();
    return found;
  };
  const unsigned int top = thread < groups ? of_groups[blockIdx.x * groups + thread] : 0u;
  tops[thread] = top;
  if (thread == 0u) count = 0u, bound = FINITE;
  __syncthreads();
  unsigned int above = 0u;
  #pragma unroll 8
  for (unsigned int other = 0u; other < groups; ++other)
    above += tops[other] > top || (tops[other] == top && other < thread);
  if (thread < groups && above == k - 1u && top > FINITE) bound = top;
  __syncthreads();
  const unsigned int least = bound;
  for (unsigned int group = warp; group < groups; group += 32u) {
    if (tops[group] < least) continue;
    const unsigned int end = min((group + 1u) * size, vocabulary);
    #pragma unroll 8
    for (unsigned int at = group * size + lane; at < end; at += 32u) {
      const unsigned int key = key_of(scores[row + at]);
      if (key >= least) note(key, at);
    }
  }
  __syncthreads();
  unsigned int cut = least, listed = count, ties = 0u;
  if (listed > ROOM) {
    cut = 0u;
    for (unsigned int bit = 0x80000000u; bit; bit >>= 1) {
      unsigned int some = 0u, all = 0u;
      for (unsigned int at = thread; at < vocabulary; at += blockDim.x)
        some += key_of(scores[row + at]) >= (cut | bit);
      for (unsigned int with = 16u; with; with >>= 1) some += __shfl_xor_sync(~0u, some, with);
      if (lane == 0u) sums[warp] = some;
      __syncthreads();
      for (unsigned int other = 0u; other < blockDim.x >> 5; ++other) all += sums[other];
      __syncthreads();
      if (all >= k) cut |= bit;
    }
    // Fewer than k are larger: those are listed. Equal ones are counted, in the order of the vocabulary.
    if (thread == 0u) count = 0u;
    __syncthreads();
    for (unsigned int begin = 0u; begin < vocabulary; begin += blockDim.x) {
      const unsigned int at = begin + thread, key = at < vocabulary ? key_of(scores[row + at]) : 0u;
      unsigned int all;
      const unsigned int place = ties + before(key == cut, all);
      if (key == cut) order[row + place] = at;
      if (key > cut) note(key, at);
      ties += all;
    }
    __syncthreads();
    listed = count;
  } else if (listed >= k) {
    for (unsigned int i = thread; i < listed; i += blockDim.x) {
      unsigned int larger = 0u, not_less = 0u;
      for (unsigned int j = 0u; j < listed; ++j) larger += keys[j] > keys[i], not_less += keys[j] >= keys[i];
      if (larger < k && k <= not_less) bound = keys[i];
    }
    __syncthreads();
    cut = bound;
  }
  unsigned int all = ties;
  for (unsigned int j = 0u; j < listed; ++j) all += keys[j] >= cut;
  if (thread == 0u) left[blockIdx.x] = cut == ALL ? ALL : all;
  if (cut == ALL) return;
  for (unsigned int place = thread; place < ties; place += blockDim.x)
    ascending[row + place] = scores[row + order[row + place]];
  for (unsigned int i = thread; i < listed; i += blockDim.x) {
    if (keys[i] < cut) continue;
    unsigned int place = ties;
    for (unsigned int j = 0u; j < listed; ++j)
      place += keys[j] >= cut && (keys[j] < keys[i] || (keys[j] == keys[i] && places[j] < places[i]));
    order[row + place] = places[i];
    ascending[row + place] = scores[row + places[i]];
  }
  __syncthreads();
  if (all == 0u) return;
  const unsigned int first = vocabulary - all, four = first >> 2;
  const float top_score = ascending[row + all - 1u];
  float own = 0.0f;
  for (unsigned int at = (four & ~(blockDim.x - 1u)) + thread; at < vocabulary >> 2; at += blockDim.x)
    for (unsigned int j = 4u * at; j < 4u * at + 4u; ++j)
      if (j >= first) own = __fadd_rn(own, expf(ascending[row + j - first] - top_score));
  own = summed(own, of_warps, thread, lane, warp);
  if (thread == 0u) whole = own;
  __syncthreads();
  for (unsigned int place = thread; place < all; place += blockDim.x)
    probabilities[row + first + place] = __fdiv_rn(expf(ascending[row + place] - top_score), whole);
}

template <int THREADS>
__global__ void __launch_bounds__(THREADS) kept(const float* __restrict__ scores,
  const float* __restrict__ sums, const unsigned int* __restrict__ order, const float* __restrict__ ascending,
  const unsigned int* __restrict__ left, float* result, unsigned int vocabulary, unsigned int least, float limit) {
  const unsigned long long row = (unsigned long long)blockIdx.x * vocabulary;
  const unsigned int all = left[blockIdx.x];
  if (all == ALL) {
    for (unsigned int at = threadIdx.x; at < vocabulary; at += blockDim.x) result[row + at] = scores[row + at];
    return;
  }
  for (unsigned int place = threadIdx.x; place < all; place += blockDim.x) {
    const unsigned int at = vocabulary - all + place;
    if (sums[row + at] <= limit && at + least < vocabulary) continue;
    result[row + order[row + place]] = ascending[row + place];
  }
}

template <int THREADS>
__global__ void __launch_bounds__(THREADS) drawn(const float* __restrict__ result,
  const float* __restrict__ noise, const unsigned int* __restrict__ order, const float* __restrict__ ascending,
  const unsigned int* __restrict__ left, long long* tokens, unsigned int vocabulary) {
  __shared__ float of_warps[32], whole;
  __shared__ unsigned long long best;
  const unsigned int thread = threadIdx.x, lane = thread & 31u, warp = thread >> 5;
  const unsigned int all = left[blockIdx.x] == ALL ? 0u : left[blockIdx.x];
  const unsigned long long row = (unsigned long long)blockIdx.x * vocabulary;
  const float none = __uint_as_float(0xff800000u), top_score = all ? ascending[row + all - 1u] : none;
  float own = 0.0f;
  #pragma unroll 8
  for (unsigned int at = thread; at < vocabulary >> 2; at += blockDim.x) {
    const float4 four = *(const float4*)(result + row + 4u * at);
    if (four.x != none) own = __fadd_rn(own, expf(four.x - top_score));
    if (four.y != none) own = __fadd_rn(own, expf(four.y - top_score));
    if (four.z != none) own = __fadd_rn(own, expf(four.z - top_score));
    if (four.w != none) own = __fadd_rn(own, expf(four.w - top_score));
  }
  own = summed(own, of_warps, thread, lane, warp);
  if (thread == 0u) whole = own, best = 0ull;
  __syncthreads();
  // The token with the largest quotient; the lowest of several. If all are NaN, token 0, as PyTorch's argmax does.
  for (unsigned int place = thread; place < all; place += blockDim.x) {
    const unsigned int token = order[row + place];
    const float quotient = __fdiv_rn(__fdiv_rn(expf(result[row + token] - top_score), whole), noise[row + token]);
    if (quotient > 0.0f) atomicMax(&best, (unsigned long long)__float_as_uint(quotient) << 32 | (unsigned int)~token);
  }
  __syncthreads();
  if (thread == 0u) tokens[blockIdx.x] = best ? (long long)~(unsigned int)best : 0ll;
}
}  // namespace top_tokens
