"""Training's attention between its products: shares of scores, and gradients of scores, in one kernel each.

PyTorch writes scores that are hidden, their softmax in float32, and that in 16 bits; then the gradients of shares less
a sum, and those times the shares. These kernels read scores and write 16 bits. Differences of scores, exponentials and
sums are in float32, as in PyTorch, in another order. A query that sees no key has shares of zero.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gemma4_compat._kernels.programs import Kernel, instance, kinds

_FILE = "shares.cuh"
#: Threads that take a row: more for more keys. Each holds so many.
_LANES, _HELD = (32, 256, 512), 32
_THREADS = 256  # of a block at least


class Scores(NamedTuple):
    """Scores of attention, and which of them are seen.

    Attributes:
        numbers: float32 (matrices, queries of all heads that share keys, keys), contiguous: a matrix for each row of
            the batch, head of the keys, and window.
        shown: bool, broadcast to (rows of the batch, heads of the keys, windows, heads that share one, queries, keys);
            None: a query sees the keys before the first query, and those up to its own.
        sizes: heads of the keys, windows, heads that share one, and queries.
        by_query: whether a matrix has one query after the other, not one head after the other.
        start: keys before the first query, where there is no mask.
        scale: what scores are multiplied by.
    """

    numbers: Any
    shown: Any
    sizes: tuple[int, int, int, int]
    by_query: bool
    start: int
    scale: float


def shares(scores: Scores, found: Any, sums: Any) -> Kernel:
    """The kernel that writes shares.

    Args:
        scores: as they are.
        found: bfloat16 or float16, as large as the scores.
        sums: float32 (rows of all matrices, 2): what :func:`gradients` asks for.
    """
    lanes = _lanes(scores.numbers.shape[2])
    is_long = scores.numbers.shape[2] > lanes * _HELD
    return _kernel("of_scores", scores, (), (found, sums), lanes, is_long)


def gradients(scores: Scores, sums: Any, given: Any, totals: Any, found: Any) -> Kernel:
    """The kernel that writes gradients of products.

    Args:
        scores: those of :func:`shares`.
        sums: that it has written.
        given: gradients of shares, float32, as large as the scores.
        totals: float32, for each row the sum of its shares times their gradients.
        found: bfloat16 or float16, as large as the scores.
    """
    return _kernel("gradients", scores, (sums, given, totals), (found,), _lanes(scores.numbers.shape[2]))


def _lanes(keys: int) -> int:
    return next((lanes for lanes in _LANES if keys <= lanes * _HELD), _LANES[-1])


def _kernel(name: str, scores: Scores, read: tuple[Any, ...], written: tuple[Any, ...], *how: int | bool) -> Kernel:
    numbers, shown, (heads, windows, group, queries), by_query, start, scale = scores
    rows, keys = numbers.shape[0] * numbers.shape[1], numbers.shape[2]
    steps = [0] * 6
    if shown is not None:
        batch = numbers.shape[0] // (heads * windows)
        steps = list(shown.expand(batch, heads, windows, group, queries, keys).stride())
    sizes = rows, keys, queries, group, windows, heads, int(by_query), start, *steps, float(scale)
    kind = next(one.dtype for one in written if one.dtype.itemsize == 2)
    text = instance(_FILE, f"shares::{name}", kinds()[kind].name, shown is not None, *how)
    tensors = numbers, numbers if shown is None else shown, *read, *written
    threads = max(_THREADS, how[0])
    return Kernel(text, tensors, len(written), sizes, threads, (-(-rows // (threads // how[0])), 1))
