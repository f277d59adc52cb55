"""Top-k and top-p, which Gemma's defaults ask for, in a fraction of the time that a look at all scores takes.

transformers' ``TopPLogitsWarper`` sorts a whole row, and PyTorch computes its softmax in one block, although top-k has
left a few dozen scores. Here a warp finds the largest score of each group of a row. The k-th largest of those is a
bound: at least k scores are not below it. One block looks for them in the groups that reach it, finds the k-th
largest, and puts those that are left in ascending order, equal ones in the vocabulary's, as a stable sort does. It
adds up their exponentials as PyTorch's softmax does (SoftMax.cu: 1024 threads, four scores at once, warps, then the
block), where those of all other scores are zeros. PyTorch adds up the probabilities, in a row as long as
transformers', so that each sum has the same bits. So has each probability that a token is drawn by.

If more scores reach the bound than a block has room for, it looks at all of them, bit by bit of the k-th largest.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from typing import Any, NamedTuple

from gemma4_compat._common.bits import same_bits
from gemma4_compat._kernels import kernels
from gemma4_compat._kernels.programs import Kernel

_log = logging.getLogger("gemma4_compat")
_lock = threading.Lock()
_exact: weakref.WeakKeyDictionary[kernels.Kernels, bool] = weakref.WeakKeyDictionary()

#: Groups of a row at most, and so the largest k: a thread of a block for each.
MOST = 1024
_ROOM = 2048  # scores that a block sorts
_WARPS = 8  # of a block that looks at groups
#: How many scores are left: none was removed, because the k-th largest is NaN, which no score is less than.
_ALL = "0xffffffffu"
#: Scores of a row at least, and what divides them: other rows PyTorch adds up in another order.
_LONG, _DIVIDES = 1 << 14, 4 * MOST
_TRIED = 1 << 16  # scores: those of one group in 16 are too many for a block, if they are the largest

#: Unsigned integers in the order of ``torch.topk``: NaN is the largest, both zeros are equal.
_KEY = """  auto key_of = [](float x) -> unsigned int {
    const unsigned int bits = x == 0.0f ? 0u : __float_as_uint(x);
    return x != x ? 0xffffffffu : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  };
"""

#: The sum of a block, in the order of cuda_utils::BlockReduce; only the first thread has it.
_SUM = """  auto summed = [&](float x) -> float {
    for (unsigned int by = 16u; by; by >>= 1) x = __fadd_rn(x, __shfl_down_sync(~0u, x, by));
    if (lane == 0u) of_warps[warp] = x;
    __syncthreads();
    x = thread < blockDim.x >> 5 ? of_warps[lane] : 0.0f;
    if (warp == 0u)
      for (unsigned int by = 16u; by; by >>= 1) x = __fadd_rn(x, __shfl_down_sync(~0u, x, by));
    return x;
  };
"""

_MAXIMA = (
    f"""extern "C" __global__ void __launch_bounds__({32 * _WARPS}) maxima(const float* __restrict__ scores,
  unsigned int* largest, float* probabilities, float* result, unsigned int vocabulary, unsigned int size,
  unsigned int groups) {{
{_KEY}"""
    + r"""  const unsigned int lane = threadIdx.x & 31u;
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
"""
)

_LARGEST = (
    f"""extern "C" __global__ void __launch_bounds__({MOST}) largest(const float* __restrict__ scores,
  const unsigned int* __restrict__ of_groups, float* probabilities, unsigned int* order, float* ascending,
  unsigned int* left,
  unsigned int vocabulary, unsigned int size, unsigned int groups, unsigned int k) {{
  constexpr unsigned int ROOM = {_ROOM}u, ALL = {_ALL}, FINITE = 0x00800000u;  // -inf has the key before
  __shared__ unsigned int tops[{MOST}], keys[ROOM], places[ROOM], sums[32], count, bound;
  __shared__ float of_warps[32], whole;
  const unsigned int thread = threadIdx.x, lane = thread & 31u, warp = thread >> 5;
{_KEY}{_SUM}"""
    + r"""  const unsigned long long row = (unsigned long long)blockIdx.x * vocabulary;
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
  own = summed(own);
  if (thread == 0u) whole = own;
  __syncthreads();
  for (unsigned int place = thread; place < all; place += blockDim.x)
    probabilities[row + first + place] = __fdiv_rn(expf(ascending[row + place] - top_score), whole);
}
"""
)

_KEPT = f"""extern "C" __global__ void __launch_bounds__({MOST}) kept(const float* __restrict__ scores,
  const float* __restrict__ sums, const unsigned int* __restrict__ order, const float* __restrict__ ascending,
  const unsigned int* __restrict__ left, float* result, unsigned int vocabulary, unsigned int least, float limit) {{
  const unsigned long long row = (unsigned long long)blockIdx.x * vocabulary;
  const unsigned int all = left[blockIdx.x];
  if (all == {_ALL}) {{
    for (unsigned int at = threadIdx.x; at < vocabulary; at += blockDim.x) result[row + at] = scores[row + at];
    return;
  }}
  for (unsigned int place = threadIdx.x; place < all; place += blockDim.x) {{
    const unsigned int at = vocabulary - all + place;
    if (sums[row + at] <= limit && at + least < vocabulary) continue;
    result[row + order[row + place]] = ascending[row + place];
  }}
}}
"""

_DRAWN = (
    f"""extern "C" __global__ void __launch_bounds__({MOST}) drawn(const float* __restrict__ result,
  const float* __restrict__ noise, const unsigned int* __restrict__ order, const float* __restrict__ ascending,
  const unsigned int* __restrict__ left, long long* tokens, unsigned int vocabulary) {{
  __shared__ float of_warps[32], whole;
  __shared__ unsigned long long best;
  const unsigned int thread = threadIdx.x, lane = thread & 31u, warp = thread >> 5;
{_SUM}  const unsigned int all = left[blockIdx.x] == {_ALL} ? 0u : left[blockIdx.x];
"""
    + r"""  const unsigned long long row = (unsigned long long)blockIdx.x * vocabulary;
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
  own = summed(own);
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
"""
)
_TEXTS = _MAXIMA, _LARGEST, _KEPT, _DRAWN


class Limits(NamedTuple):
    """Which tokens are left.

    Attributes:
        k: of top-k.
        p: of top-p; more than 1 without.
        least: so many tokens top-p leaves in any case.
    """

    k: int
    p: float
    least: int


def limits(top_k: Any, top_p: Any) -> Limits | None:
    """Those of a ``TopKLogitsWarper`` and of a ``TopPLogitsWarper`` or None; None if the kernels have no such."""
    values = {one.filter_value for one in (top_k, top_p) if one is not None}
    if values != {-math.inf} or not 0 < top_k.top_k <= MOST:
        return None
    return Limits(top_k.top_k, *((2.0, 1) if top_p is None else (top_p.top_p, top_p.min_tokens_to_keep)))


def serves(scores: Any) -> bool:
    """Whether the kernels compute what transformers and PyTorch do for these scores, (rows, vocabulary)."""
    import torch

    rows, vocabulary = scores.shape
    return (
        scores.device.type in kernels.COMPILERS
        and scores.dtype is torch.float32
        and rows > 0
        and vocabulary >= _LONG
        and not vocabulary % _DIVIDES
        and is_exact(scores.device)
    )


def filtered(scores: Any, k: int, p: float, least: int, single: bool) -> Any:
    """The scores, with -inf for tokens that are not left.

    Args:
        scores: (rows, vocabulary), which :func:`serves` is true of.
        k: as in :class:`Limits`.
        p: the same.
        least: the same.
        single: whether rows have the bits that each has in a call of its own: PyTorch's order of additions depends on
            how many rows there are.
    """
    work = Work(scores, Limits(k, p, least))
    work.run(single=single)
    return work.result


def drawn(scores: Any, noise: Any, k: int, p: float, least: int) -> Any:
    """The tokens that are drawn from those that are left, (rows,), each row as in a call of its own.

    Args:
        scores: as of :func:`filtered`.
        noise: exponentially distributed, as ``scores``.
        k: as in :class:`Limits`.
        p: the same.
        least: the same.
    """
    work = Work(scores, Limits(k, p, least))
    work.run(single=True)
    return work.drawn(noise)


class Work:
    """What a call launches, and its memory.

    Args:
        scores: (rows, vocabulary), float32.
        given: which of them are left.

    Attributes:
        before: kernels that write ``probabilities``: zeros, and then those that top-k leaves, in ascending order.
        probabilities: (rows, vocabulary).
        sums: of ``probabilities``, by PyTorch; the same tensor without top-p, which alone reads them.
        after: the kernel that then writes ``result``.
        result: the scores, with -inf for tokens that are not left.
    """

    def __init__(self, scores: Any, given: Limits) -> None:
        import torch

        scores, device = scores.contiguous(), scores.device
        rows, vocabulary = scores.shape
        size = -(-vocabulary // MOST)
        groups = -(-vocabulary // size)
        shapes = (rows, groups), scores.shape, (rows,)
        of_groups, order, left = (torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes)
        ascending, self.probabilities, self.result = (torch.empty_like(scores) for _ in range(3))
        self._rows, self._left = (rows, 1), (order, ascending, left)
        self.sums = self.probabilities if given.p > 1 else torch.empty_like(scores)
        grid, sizes = (-(-groups // _WARPS), rows), (vocabulary, size, groups)
        written: tuple[Any, ...] = (of_groups, self.probabilities, self.result)
        self.before = [Kernel(_MAXIMA, (scores, *written), 3, sizes, 32 * _WARPS, grid)]
        written = self.probabilities, *self._left
        self.before += [Kernel(_LARGEST, (scores, of_groups, *written), 4, (*sizes, given.k), MOST, self._rows)]
        numbers = vocabulary, given.least, 1 - given.p
        self.after = Kernel(_KEPT, (scores, self.sums, *self._left, self.result), 1, numbers, MOST, self._rows)

    def run(self, *, single: bool) -> None:
        """Write ``result``."""
        import torch

        own = kernels.of(self.result.device)
        for kernel in self.before:
            own.launch(kernel)
        if self.sums is not self.probabilities:
            for given, sums in zip(*(one.split(1 if single else len(one)) for one in (self.probabilities, self.sums))):
                torch.cumsum(given, dim=-1, out=sums)
        own.launch(self.after)

    def drawing(self, noise: Any) -> tuple[Kernel, Any]:
        """The kernel that draws tokens from ``result``, and its memory."""
        import torch

        tokens = torch.empty(self._rows[:1], dtype=torch.int64, device=noise.device)
        read = self.result, noise.contiguous(), *self._left
        return Kernel(_DRAWN, (*read, tokens), 1, (noise.shape[-1],), MOST, self._rows), tokens

    def drawn(self, noise: Any) -> Any:
        """Tokens, drawn from ``result``."""
        kernel, tokens = self.drawing(noise)
        kernels.of(self.result.device).launch(kernel)
        return tokens


def is_exact(device: Any) -> bool:
    """Whether the kernels have transformers' bits on a device. Not known inside a capture, unless it was before."""
    import torch

    own = kernels.of(device)
    known = _exact.get(own)
    if known is not None or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return bool(known)
    with _lock:
        if own in _exact:
            return _exact[own]
        try:
            refused = kernels.refusal(device, "top-p", lambda: _has_same_bits(own, device))
        except torch.OutOfMemoryError:
            return False  # only this time
        if refused is not None:
            _log.info("gemma4_compat: transformers looks at all scores for top-k and top-p: %s", refused)
        _exact[own] = refused is None
        return refused is None


def _has_same_bits(own: kernels.Kernels, device: Any) -> bool:
    """Try rows with many equal scores, few that are not -inf, NaN, and more at the top than a block has room for."""
    import torch
    from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

    own.prepare(_TEXTS, [])
    generator = torch.Generator(device).manual_seed(0)
    numbers = torch.randn((7, _TRIED), generator=generator, device=device)
    noise = torch.empty_like(numbers).exponential_(generator=generator)
    scores = numbers.to(torch.bfloat16).float()
    scores[1] = numbers[1].sort().values
    scores[2, 50:] = -math.inf
    scores[3] = 0.5
    scores[4] = scores[4].clamp(max=2.0)
    scores[5, 7 :: _TRIED // 4] = math.nan
    scores[6, 7 :: _TRIED // 64] = math.nan
    for k, p, least in ((64, 0.95, 1), (MOST, 0.3, 5), (50, 2.0, 1)):
        both = [TopKLogitsWarper(k), *([] if p > 1 else [TopPLogitsWarper(p, min_tokens_to_keep=least)])]
        expected = [_by_transformers(one, both) for one in (scores, *scores.split(1))]
        tokens = torch.cat([(one.softmax(-1) / row).argmax(-1) for one, row in zip(expected[1:], noise.split(1))])
        if not (
            same_bits(filtered(scores, k, p, least, False), expected[0])
            and same_bits(filtered(scores, k, p, least, True), torch.cat(expected[1:]))
            and same_bits(drawn(scores, noise, k, p, least), tokens)
        ):
            return False
    return True


def _by_transformers(scores: Any, processors: list[Any]) -> Any:
    for processor in processors:
        scores = processor(None, scores)
    return scores
