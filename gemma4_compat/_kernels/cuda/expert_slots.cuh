// Experts in host memory whose rows are kept on the card in slots: which slot each expert of a step has, and the copies
// of those that had none. The least recently used slots go first.
// Launched by specs/expert_slots.py; proved by tests/unit/kernels/test_expert_slots.py.
#pragma once
#include "prelude.cuh"

namespace expert_slots {
enum { WARP = 32, WORDS = 4 };  // words of a thread on their way at once; those of a warp are in one piece

// STEP: threads of a warp, or of a smaller block.
template <typename Word, int STEP>
__device__ __forceinline__ void copied(const unsigned char* from, unsigned char* to, unsigned long long bytes) {
  const unsigned int words = (unsigned int)(bytes / sizeof(Word)), i = blockIdx.x * blockDim.x + threadIdx.x;
  for (unsigned int at = i / STEP * (STEP * WORDS) + i % STEP; at < words; at += WORDS * gridDim.x * blockDim.x) {
    Word held[WORDS];
    #pragma unroll
    for (int k = 0; k < WORDS; ++k)
      if (at + k * STEP < words) held[k] = ((const Word*)from)[at + k * STEP];
    #pragma unroll
    for (int k = 0; k < WORDS; ++k)
      if (at + k * STEP < words) ((Word*)to)[at + k * STEP] = held[k];
  }
}

// One block. n0 indices in `chosen`, n1 experts, n2 slots, at least n0 and at most MOST. `state`: the number of the last
// step; for each expert its slot; for each slot its expert, and the step that used it last. -1: none.
// Writes the slot of each index, and whether it has to be copied there: once, of equal ones. Adds hits and misses.
template <int MOST>
__global__ void chosen(const long long* __restrict__ chosen, int* state, long long* counts,
    long long* __restrict__ into, int* __restrict__ missing, unsigned int n0, unsigned int n1, unsigned int n2) {
  __shared__ int used[MOST], is_new[MOST], freed[MOST];
  int *slot_of = state + 1, *expert_in = slot_of + n1, *last = expert_in + n2;
  const unsigned int t = threadIdx.x, step = blockDim.x;
  const int now = state[0] + 1;
  for (unsigned int s = t; s < n2; s += step) used[s] = last[s];
  __syncthreads();
  for (unsigned int i = t; i < n0; i += step) {
    int slot = slot_of[chosen[i]];
    bool is_first = true;
    for (unsigned int j = 0; j < i && is_first; ++j) is_first = chosen[j] != chosen[i];
    is_new[i] = is_first && slot < 0;
    if (slot >= 0) used[slot] = now;
    if (is_first) atomicAdd((unsigned long long*)&counts[slot < 0], 1ull);
  }
  __syncthreads();
  for (unsigned int s = t; s < n2; s += step) {
    if (used[s] == now) continue;
    unsigned int rank = 0;
    for (unsigned int o = 0; o < n2; ++o) rank += used[o] < used[s] || (used[o] == used[s] && o < s);
    if (rank < n0) freed[rank] = s;
  }
  __syncthreads();
  for (unsigned int i = t; i < n0; i += step) {
    missing[i] = is_new[i];
    if (!is_new[i]) continue;
    unsigned int rank = 0;
    for (unsigned int j = 0; j < i; ++j) rank += is_new[j];
    int slot = freed[rank], before = expert_in[slot];
    if (before >= 0) slot_of[before] = -1;  // it is not chosen now: its slot would not be free
    slot_of[chosen[i]] = slot;
    expert_in[slot] = (int)chosen[i];
    used[slot] = now;
  }
  __syncthreads();
  for (unsigned int i = t; i < n0; i += step) into[i] = slot_of[chosen[i]];
  for (unsigned int s = t; s < n2; s += step) last[s] = used[s];
  if (t == 0) state[0] = now;
}

// Blocks in y: indices. n0 tensors, for each of which `layout` has where it begins in `memory` and in `slots`, and the
// bytes of a row.
template <int THREADS>
__global__ void __launch_bounds__(THREADS) filled(const unsigned char* __restrict__ memory,
    const long long* __restrict__ layout, const long long* __restrict__ chosen, const long long* __restrict__ into,
    const int* __restrict__ missing, unsigned char* slots, unsigned int n0) {
  enum { STEP = THREADS < WARP ? THREADS : (int)WARP };
  if (!missing[blockIdx.y]) return;
  for (unsigned int k = 0; k < n0; ++k, layout += 3) {
    const unsigned long long bytes = layout[2];
    const unsigned char* from = memory + layout[0] + chosen[blockIdx.y] * bytes;
    unsigned char* to = slots + layout[1] + into[blockIdx.y] * bytes;
    if (bytes % 16 == 0)
      copied<Word16, STEP>(from, to, bytes);
    else if (bytes % 4 == 0)
      copied<unsigned int, STEP>(from, to, bytes);
    else
      copied<unsigned char, STEP>(from, to, bytes);
  }
}

}  // namespace expert_slots
