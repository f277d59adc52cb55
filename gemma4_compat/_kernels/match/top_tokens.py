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

import math
from typing import Any, NamedTuple

import torch

from gemma4_compat._engine.io.bits import same_bits
from gemma4_compat._kernels import kernels
from gemma4_compat._kernels.programs import Kernel, instance

#: Groups of a row at most, and so the largest k: a thread of a block for each.
MOST = 1024
_ROOM = 2048  # scores that a block sorts
_WARPS = 8  # of a block that looks at groups
#: Scores of a row at least, and what divides them: other rows PyTorch adds up in another order.
_LONG, _DIVIDES = 1 << 14, 4 * MOST
_TRIED = 1 << 16  # scores: those of one group in 16 are too many for a block, if they are the largest

_FILE = "top_tokens.cuh"
_MAXIMA = instance(_FILE, "top_tokens::maxima", 32 * _WARPS)
_LARGEST = instance(_FILE, "top_tokens::largest", MOST, _ROOM)
_KEPT = instance(_FILE, "top_tokens::kept", MOST)
_DRAWN = instance(_FILE, "top_tokens::drawn", MOST)
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


def supports(scores: Any) -> bool:
    """Whether the kernels compute what transformers and PyTorch do for these scores, (rows, vocabulary)."""
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
    """The scores, (rows, vocabulary), with -inf for tokens that are not left.

    :func:`supports` is true of the scores, and :class:`Limits` says what the numbers are. With ``single``, rows have
    the bits that each has in a call of its own: PyTorch's order of additions depends on how many rows there are.
    """
    work = Work(scores, Limits(k, p, least))
    work.run(single=single)
    return work.result


def drawn(scores: Any, noise: Any, k: int, p: float, least: int) -> Any:
    """The tokens that are drawn from those that :func:`filtered` leaves, (rows,), each row as in a call of its own.

    ``noise`` is exponentially distributed, as many numbers as scores.
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
        own = kernels.of(self.result.device)
        for kernel in self.before:
            own.launch(kernel)
        if self.sums is not self.probabilities:
            for given, sums in zip(*(one.split(1 if single else len(one)) for one in (self.probabilities, self.sums))):
                torch.cumsum(given, dim=-1, out=sums)
        own.launch(self.after)

    def drawing(self, noise: Any) -> tuple[Kernel, Any]:
        """The kernel that draws tokens from ``result``, and its memory."""
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
    own = kernels.of(device)
    instead = "transformers looks at all scores for top-k and top-p"
    return own.selftest("top-p", "top-p", instead, lambda: _has_same_bits(own, device))


def _has_same_bits(own: kernels.Kernels, device: Any) -> bool:
    """Try rows with many equal scores, few that are not -inf, NaN, and more at the top than a block has room for."""
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
