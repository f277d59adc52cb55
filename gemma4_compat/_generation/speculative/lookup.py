"""Drafts from the text itself: what followed the last time the newest tokens were there (prompt lookup)."""

from __future__ import annotations


class Lookup:
    """Where runs of tokens have ended in a text that grows.

    Args:
        longest: tokens of a run, at most.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._text: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # by run: where it ended last, before the end of the text

    def extend(self, tokens: list[int]) -> None:
        """Add tokens to the text."""
        for token in tokens:
            for run in self._runs():
                self._after[run] = len(self._text)
            self._text.append(token)

    def drafts(self, most: int) -> list[int]:
        """What followed the longest run that ends the text, where it was last; empty if it is new.

        Args:
            most: tokens of the result.
        """
        for run in self._runs():
            if run in self._after:
                at = self._after[run]
                return self._text[at : at + most]
        return []

    def _runs(self) -> list[tuple[int, ...]]:
        """The runs that end the text, the longest first."""
        sizes = range(min(self._longest, len(self._text)), 0, -1)
        return [tuple(self._text[-size:]) for size in sizes]
