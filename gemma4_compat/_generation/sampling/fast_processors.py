"""transformers' logits processors and stopping criteria, with less Python and fewer operations for a token.

The values are the same, also if a user's streamer changes a processor between two tokens. ``LogitsProcessorList``
inspects the signature of each processor for every token, and criteria make tensors for what the host knows, such as
whether the text has reached its limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from gemma4_compat._graphs import deferred_stop

_PROCESSORS, _CRITERIA = "logits_processor", "stopping_criteria"


def quickened(given: dict[str, Any]) -> dict[str, Any]:
    """Those of these arguments of ``_sample`` that can be called faster, all of them transformers' own."""
    found: dict[str, Any] = {}
    processors: Any = given.get(_PROCESSORS)
    criteria: Any = given.get(_CRITERIA)
    if is_class(processors, "LogitsProcessorList") and all(map(_takes_two, processors)):
        found[_PROCESSORS] = _Processors(processors)
    if is_class(criteria, "StoppingCriteriaList") and all(
        any(is_class(one, name) for name in _QUICK) for one in criteria
    ):
        found[_CRITERIA] = _Criteria(criteria)
    return found


def is_class(one: Any, name: str) -> bool:
    """Whether it has that class of transformers, called as transformers wrote it."""
    kind = type(one)
    return (
        kind.__name__ == name
        and kind.__module__.startswith("transformers.generation.")
        and deferred_stop.is_libraries(kind.__call__)
    )


def paired(processors: Iterable[Any]) -> list[Any]:
    """These processors, with a :class:`TopTokens` in place of each top-k or top-p, and of top-p after top-k."""
    found: list[Any] = []
    for one in processors:
        if is_class(one, "TopKLogitsWarper"):
            found.append(TopTokens(one, None))
        elif is_class(one, "TopPLogitsWarper"):
            follows = found and isinstance(found[-1], TopTokens) and found[-1].top_p is None
            found.append(TopTokens(found.pop().top_k if follows else None, one))
        else:
            found.append(one)
    return found


class TopTokens:
    """Top-k, top-p, or one after the other, by :mod:`top_tokens` where that serves.

    Args:
        top_k: a ``TopKLogitsWarper`` or None.
        top_p: a ``TopPLogitsWarper`` or None.
    """

    def __init__(self, top_k: Any, top_p: Any) -> None:
        from gemma4_compat._kernels.match import top_tokens

        self.top_k, self.top_p = top_k, top_p
        self._kernels = top_tokens

    def _limits(self, scores: Any) -> Any:
        """What the kernels take for these scores; None if they do not serve."""
        found = None if self.top_k is None else self._kernels.limits(self.top_k, self.top_p)
        return found if found is not None and self._kernels.supports(scores) else None

    def __call__(self, _ids: Any, scores: Any) -> Any:
        return self._filtered(scores, single=False)

    def rows(self, scores: Any) -> Any:
        """What each row, (rows, vocabulary), gets in a call of its own."""
        return self._filtered(scores, single=True)

    def drawn(self, scores: Any, noise: Any) -> Any:
        """The tokens of these rows, (rows,), each as in a call of its own.

        Args:
            scores: (rows, vocabulary), float32.
            noise: exponentially distributed, as ``scores``.
        """
        limits = self._limits(scores)
        if limits is not None:
            return _operator("drawn")(scores, noise, *limits)
        return (self.rows(scores).softmax(dim=-1) / noise).argmax(dim=-1)

    def _filtered(self, scores: Any, *, single: bool) -> Any:
        import torch

        limits = self._limits(scores)
        if limits is not None:
            return _operator("filtered")(scores, *limits, single)
        if self.top_k is not None:
            scores = self.top_k(None, scores)
        if self.top_p is None:
            return scores
        if not single:
            return self.top_p(None, scores)
        return torch.cat([self.top_p(None, row) for row in scores.split(1)])


def _operator(name: str) -> Any:
    from gemma4_compat._kernels.match import custom

    return custom.operator(name)


def _takes_two(processor: Any) -> bool:
    import inspect

    return len(inspect.signature(processor.__call__).parameters) == 2


class _Processors(list[Any]):
    """A ``LogitsProcessorList`` whose processors take ids and scores."""

    def __init__(self, processors: list[Any]) -> None:
        super().__init__(processors)
        self._functions = [_NoEnd(one) if _NoEnd.serves(one) else one for one in paired(processors)]

    def __call__(self, ids: Any, scores: Any) -> Any:
        for function in self._functions:
            scores = function(ids, scores)
        return scores


class _NoEnd:
    """``MinLengthLogitsProcessor`` or ``MinNewTokensLengthLogitsProcessor``, which finds end tokens once."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._ends: Any = None
        self._mask: Any = None

    def _length(self) -> int:
        found = self._processor
        length = getattr(found, "min_length", None)
        return int(found.prompt_length_to_skip + found.min_new_tokens if length is None else length)

    @staticmethod
    def serves(processor: Any) -> bool:
        return is_class(processor, "MinLengthLogitsProcessor") or is_class(
            processor, "MinNewTokensLengthLogitsProcessor"
        )

    def __call__(self, ids: Any, scores: Any) -> Any:
        import torch

        if ids.shape[-1] >= self._length():
            return scores.clone()
        if self._ends is not self._processor.eos_token_id:
            self._ends = self._processor.eos_token_id
            vocabulary = torch.arange(scores.shape[-1], device=scores.device)
            self._mask = torch.isin(vocabulary, self._ends.to(scores.device))
        return torch.where(self._mask, -math.inf, scores)


class _Criteria(list[Any]):
    """A ``StoppingCriteriaList`` of the criteria in :data:`_QUICK`."""

    def __init__(self, criteria: Any) -> None:
        super().__init__(criteria)
        self.max_length = criteria.max_length
        self._functions = [_QUICK[type(one).__name__](one) for one in criteria]

    def __call__(self, ids: Any, scores: Any) -> Any:
        import torch

        found = [done for function in self._functions if (done := function(ids, scores)) is not None]
        if not found:
            return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
        done, *others = found
        for other in others:
            done = done | other
        return done


#: Which rows are done; None if no row is.
_Asked = Callable[[Any, Any], Any]


def _length(criterion: Any) -> _Asked:
    def asked(ids: Any, scores: Any) -> Any:
        last, warned = criterion.max_length - 1, criterion.max_position_embeddings
        return None if ids.shape[1] <= (last if warned is None else min(last, warned)) else criterion(ids, scores)

    return asked


def _end(criterion: Any) -> _Asked:
    def asked(ids: Any, _scores: Any) -> Any:
        criterion.eos_token_id = ends = criterion.eos_token_id.to(ids.device)
        if ends.numel() == 1:
            return ids[:, -1] == ends
        return (ids[:, -1:] == ends).any(dim=-1)

    return asked


def _itself(criterion: Any) -> _Asked:
    return lambda ids, scores: criterion(ids, scores)


_QUICK: dict[str, Callable[[Any], _Asked]] = {
    "MaxLengthCriteria": _length,
    "EosTokenCriteria": _end,
    "MaxTimeCriteria": _itself,
    "StopStringCriteria": _itself,
}
