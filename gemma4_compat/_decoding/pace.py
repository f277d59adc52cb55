"""How many drafts a round has: what gives the most tokens a second, by the rounds before."""

from __future__ import annotations

#: Numbers of drafts that are tried. Each has graphs of its own.
COUNTS = (2, 4, 7)
#: Rounds without drafts that are timed before the first one with drafts.
FIRST = 4
#: While drafts do not pay: rounds without drafts before some are tried again, at first and at most; and how often
#: they are tried then.
PAUSE, LONGEST_PAUSE, ATTEMPT = 64, 1024, 2
#: After so many rounds with drafts, one without: what it takes grows with the text.
AGAIN = 64
#: Weight of the newest round in an average of seconds.
_NEWEST = 0.15
#: What counts of the rounds before, after each round; and after a pause, since when the text may have become another.
_KEPT, _KEPT_OF_PAUSE = 0.95, 0.3
#: Before any was seen: the share of drafts that are right, as if of so many, and what a draft adds to a round without.
_RIGHT, _SEEN, _ADDED = 0.6, 4.0, 0.06
#: By so much a round with drafts has to be faster, for each token.
_GAIN = 1.03


class Pace:
    """Decides on the drafts of each round of one text.

    Args:
        most: drafts of a round.

    Attributes:
        seconds: of a round, by its number of drafts: averages.
    """

    def __init__(self, most: int) -> None:
        self._counts = [count for count in COUNTS if count < most] + ([min(most, COUNTS[-1])] if most > 0 else [])
        self.seconds: dict[int, float] = {}
        self._right, self._seen = _RIGHT * _SEEN, _SEEN  # drafts, if all before them were right
        self._plain = self._drafting = self._attempts = 0
        self._pause = PAUSE

    def next(self) -> int:
        """How many drafts the next round has."""
        if not self._counts or 0 not in self.seconds or (self._plain < FIRST and not self._drafting):
            return 0
        if self._drafting >= AGAIN:
            return 0
        return self._best() or (self._counts[0] if self._plain >= self._pause else 0)

    def note(self, drafts: int, right: int, seconds: float | None) -> None:
        """After a round.

        Args:
            drafts: that it had.
            right: how many of them were right.
            seconds: that it took; None if it did what other rounds do not, such as a capture.
        """
        if seconds is not None:
            known = self.seconds.get(drafts, seconds)
            self.seconds[drafts] = known + _NEWEST * (seconds - known)
        if not drafts:
            # One round without drafts among others with drafts is no pause.
            self._plain, self._drafting = (FIRST if self._drafting else self._plain + 1), 0
            return
        self._drafting += 1
        kept = _KEPT_OF_PAUSE if self._plain >= self._pause and not self._attempts else _KEPT
        self._right, self._seen = kept * self._right + right, kept * self._seen + min(right + 1, drafts)
        if self._best():
            self._pause, self._attempts, self._plain = PAUSE, 0, 0
            return
        self._attempts += 1
        if self._attempts >= ATTEMPT:
            self._plain = self._drafting = self._attempts = 0
            self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _best(self) -> int:
        """The number of drafts that gives the most tokens a second; 0 if drafts do not pay, or nobody knows."""
        if 0 not in self.seconds:
            return 0
        best = max(self._counts, key=self._speed)
        return best if self._speed(best) > _GAIN * self._speed(0) else 0

    def _speed(self, drafts: int) -> float:
        """Tokens a second, as expected."""
        share = self._right / self._seen
        return sum(share**place for place in range(drafts + 1)) / max(self._time(drafts), 1e-9)

    def _time(self, drafts: int) -> float:
        """Seconds of a round; of one that was not timed, by the nearest one with drafts that was."""
        if drafts in self.seconds:
            return self.seconds[drafts]
        plain = self.seconds[0]
        timed = [count for count in self.seconds if count]
        if not timed:
            return plain * (1 + _ADDED * drafts)
        near = min(timed, key=lambda count: abs(count - drafts))
        return plain + (self.seconds[near] - plain) * drafts / near
