"""The best words of a head in two stages: half of its bytes are read, and the logits of the best words have its bits.

A copy of the head has 8 bits for each weight. A group of up to 128 columns of a row has a scale, and the norm of what
the copy lost. So a word's score by the copy is at most ``sum(lost norm * norm of the hidden state)`` off (Cauchy and
Schwarz, group by group), plus what is lost of the hidden state, which has 15 bits, and all roundings, of both stages.
The k-th largest lower bound is a bound for the k-th best word. Only words whose upper bound reaches it are computed
from the head, with the bits of :mod:`dense`; the others get -inf. Both bounds go through what the model does to a
logit (rounding, and a soft cap), so words that are equal only afterwards are computed as well.

If the head or the hidden state has a number that is not finite, the second stage computes all words.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from gemma4_compat._kernels.programs import Kernel, instance, kinds
from gemma4_compat._kernels.specs import dense, products

#: Best words at most, and the fewest that are asked for: a few more cost less than another graph. Twice as many as
#: top-k leaves have logits, so that top_tokens.cuh finds enough groups with a logit, and need not look at all words.
MOST, FEWEST = 1024, 128
#: Weights of a head at least; a smaller one is read faster than kernels are launched.
LEAST = 1 << 25
_FILE = "head.cuh"
_THREADS, _SELECTING = 256, 1024
_WARPS = _THREADS // 32
_WORDS = _WARPS * 4  # that have a lower bound together: those of a block, or of a warp that has many rows
_CHUNK = 64  # columns that tensor cores multiply at once
_EACH = 16  # lower bounds of a thread at most


class Copy(NamedTuple):
    """The head in 8 bits.

    Attributes:
        numbers: int8 (words, inputs).
        scales: int32 (words, groups): a scale and a norm in float16.
        sizes: float32 (words): the norm of a row, and of its copy, at most.
        counts: int64 (2): words that were computed from the head, and hidden states.
    """

    numbers: Any
    scales: Any
    sizes: Any
    counts: Any

    @classmethod
    def of(cls, weight: Any) -> Copy:
        """Memory for the copy of a weight, which :func:`unsupported_reason` has nothing against."""
        import torch

        words, inputs = weight.shape
        numbers = torch.empty((words, inputs), dtype=torch.int8, device=weight.device)
        scales = torch.empty((words, inputs // group(inputs)), dtype=torch.int32, device=weight.device)
        sizes = torch.empty(words, dtype=torch.float32, device=weight.device)
        return cls(numbers, scales, sizes, torch.zeros(2, dtype=torch.int64, device=weight.device))

    def made_from(self, weight: Any) -> Kernel:
        """The kernel that writes it."""
        words, inputs = weight.shape
        text = instance(_FILE, "head::copied", kinds()[weight.dtype].name, inputs, group(inputs))
        grid = -(-words // _WARPS), 1
        return Kernel(text, (weight.detach(), *self[:3]), 3, (words,), _THREADS, grid)


def group(inputs: int) -> int:
    """Columns of a group: a power of two."""
    return min(128, inputs & -inputs)


def nbytes(words: int, inputs: int) -> int:
    """What a copy takes."""
    return words * (inputs + 4 * (inputs // group(inputs)) + 4)


def unsupported_reason(weight: Any) -> str | None:
    """Why there is no such copy of a head; None if there is."""
    import torch

    if type(weight) not in (torch.Tensor, torch.nn.Parameter) or weight.ndim != 2:
        return "the head is not a plain weight"
    words, inputs = weight.shape
    if weight.dtype not in (torch.bfloat16, torch.float16):
        return f"the head is {str(weight.dtype).removeprefix('torch.')}"
    if weight.numel() < LEAST:
        return "the head is small"
    if (
        not dense.is_large(weight)
        or words > _EACH * _SELECTING * _WORDS
        or group(inputs) < _CHUNK
        or weight.data_ptr() % 16
    ):
        return "the head has a shape that its kernels do not know"
    if not weight.is_contiguous() or not dense.supports(weight[:1], weight):
        return "this package's kernels do not compute the head"
    return None


def best(given: Any, weight: Any, copy: Copy, most: int, cap: float) -> tuple[list[Kernel], Any]:
    """The kernels of both stages, and the logits, ``[..., words]``: those of the best words, and -inf.

    Args:
        given: hidden states, contiguous, at most ``products.MAX_ROWS`` of the weight's dtype.
        weight: of the head.
        copy: of it as it is.
        most: how many of the best words have their logits at least, and all that equal the last of these.
        cap: the model's soft cap of logits; 0 without.
    """
    import torch

    (words, inputs), device = weight.shape, weight.device
    rows, kind, each = given.numel() // inputs, kinds()[weight.dtype].name, group(inputs)
    blocks = -(-words // _WORDS)
    is_many, filled, scoring = rows > products.FEW_ROWS, rows, blocks
    if is_many:
        parts, eights = products.parts_of(rows)
        filled, scoring = parts * eights * products.FEW_ROWS, parts * -(-blocks // _WARPS)

    def memory(*shape: int, dtype: Any) -> Any:
        return torch.empty(shape, dtype=dtype, device=device)

    high, low = memory(filled, inputs, dtype=torch.int8), memory(filled, inputs, dtype=torch.int8)
    groups, slack = memory(filled, inputs // each, 2, dtype=torch.float32), memory(filled, dtype=torch.float32)
    upper, lower = memory(rows, words, dtype=weight.dtype), memory(rows, blocks, dtype=weight.dtype)
    reached = memory(rows, dtype=torch.float32)
    result = given.new_empty((*given.shape[:-1], words))
    prepared = high, low, groups, slack
    preparing = instance(_FILE, "head::given", kind, inputs, each, rows if is_many else 0)
    return [
        Kernel(preparing, (given, *prepared), 4, (), _THREADS, (filled, 1)),
        Kernel(
            instance(_FILE, "head::many_scores" if is_many else "head::scores", kind, rows, inputs, each),
            (*copy[:3], *prepared, upper, lower),
            *(2, (words, float(cap)), _THREADS, (scoring, 1)),
        ),
        Kernel(
            instance(_FILE, "head::least", kind, -(-blocks // _SELECTING)),
            (lower, reached),
            *(1, (blocks, most), _SELECTING, (rows, 1)),
        ),
        Kernel(
            instance(_FILE, "head::chosen", kind, inputs),
            (given, weight.detach(), upper, reached, result, copy.counts),
            *(2, (words,), _THREADS, (-(-words // (32 * _WARPS)), rows)),
        ),
    ], result
