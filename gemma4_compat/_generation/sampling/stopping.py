"""When a text that grows by several tokens ends: at an end token, at a length, or where a criterion says so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gemma4_compat._generation.sampling import fast_processors


class Stop:
    """When a text ends.

    Args:
        criteria: a ``StoppingCriteriaList``.
        length: tokens of the text at most, if no criterion says so.
    """

    def __init__(self, criteria: Sequence[Any], length: int) -> None:
        self.length = min([int(one.max_length) for one in criteria if _is_limit(one)] or [int(length)])
        ends = [one.eos_token_id for one in criteria if _is_end(one)]
        self._ends = {int(token) for tensor in ends for token in tensor.flatten().tolist()}
        self._others = [one for one in criteria if not _is_limit(one) and not _is_end(one)]

    @property
    def asked(self) -> bool:
        """Whether there are criteria that are asked for each token."""
        return bool(self._others)

    def end(self, before: int, tokens: list[int]) -> tuple[int, bool]:
        """How many of these tokens, after ``before`` others, belong to the text, and whether it ends there."""
        for place, token in enumerate(tokens, start=1):
            if token in self._ends or before + place >= self.length:
                return place, True
        return len(tokens), False

    def asks(self, ids: Any) -> bool:
        """Whether one of the other criteria ends the text after these tokens, (1, length)."""
        return any(bool(one(ids, None).all()) for one in self._others)


def _is_limit(criterion: Any) -> bool:
    return fast_processors.is_class(criterion, "MaxLengthCriteria")


def _is_end(criterion: Any) -> bool:
    return fast_processors.is_class(criterion, "EosTokenCriteria")
