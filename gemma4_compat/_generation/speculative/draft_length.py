"""How many drafts a speculative step has: what gives the most tokens a second, by the steps and texts before."""

from __future__ import annotations

import collections
import statistics

#: Numbers of drafts that are tried. Each has graphs of its own.
COUNTS = (2, 4, 7)
#: Steps without drafts that are timed before the first one with drafts.
FIRST = 2
#: While drafts do not pay: steps without drafts before some are tried again, at first and at most; the same at the
#: beginning of a text, where they did not pay in the one before; and how many steps have them then.
PAUSE, LONGEST_PAUSE, BEGINNING, ATTEMPT = 64, 1024, 16, 2
#: After so many steps with drafts, one without: what it takes grows with the text.
AGAIN = 64
#: Timed steps of which the median counts.
_TIMED = 9
#: What counts of the steps before, after each step; and after a pause, since when the text may have become another.
_KEPT, _KEPT_OF_PAUSE = 0.98, 0.3
#: As many drafts of the texts before count at most.
_OF_TEXTS = 8.0
#: Before any was seen: the share of drafts that are right, as if of so many, and what a draft adds to a step without.
_RIGHT, _SEEN, _ADDED = 0.6, 3.0, 0.06
#: Steps with drafts before a number of drafts is tried that was not timed.
_BEFORE_ANOTHER = 4


class Known:
    """What is known of a model and what drafts for it, from text to text.

    Attributes:
        right, seen: drafts, if all before them were right, and how many of them were; the newest count most.
        steps: with drafts.
        seconds: of a step, by its number of drafts: medians.
    """

    def __init__(self) -> None:
        self.right, self.seen, self.steps = _RIGHT * _SEEN, _SEEN, 0
        self.seconds: dict[int, float] = {}
        self._timed: dict[int, collections.deque[float]] = {}
        self._fused: dict[int, bool] = {}

    @property
    def begun(self) -> bool:
        """Whether enough steps without drafts were timed."""
        return len(self._timed.get(0, ())) >= FIRST

    def note(self, drafts: int, right: int, seconds: float | None) -> None:
        """As :meth:`DraftLength.note`."""
        if seconds is not None:
            timed = self._timed.setdefault(drafts, collections.deque(maxlen=_TIMED))
            timed.append(seconds)
            self.seconds[drafts] = statistics.median(timed)
        if drafts:
            self.keep(_KEPT)
            self.right, self.seen, self.steps = (
                self.right + right,
                self.seen + min(right + 1, drafts),
                self.steps + 1,
            )

    def note_fused(self, drafts: int, *, fused: bool) -> None:
        """Whether the graphs of such a step are fused. If that has changed, what was timed is of no use."""
        if self._fused.get(drafts, fused) != fused:
            self._timed.pop(drafts, None)
            self.seconds.pop(drafts, None)
        self._fused[drafts] = fused

    def keep(self, share: float) -> None:
        """Let the drafts that were seen count less."""
        self.right, self.seen = share * self.right, share * self.seen


class DraftLength:
    """Decides on the drafts of each step of one text. A step may be noted after the next one was decided on.

    Args:
        most: drafts of a step.
        known: of the texts before.
    """

    def __init__(self, most: int, known: Known | None = None) -> None:
        self._counts = [count for count in COUNTS if count < most] + ([min(most, COUNTS[-1])] if most > 0 else [])
        self._known = Known() if known is None else known
        self._known.keep(min(1.0, _OF_TEXTS / self._known.seen))
        self._pause, self._waited = PAUSE, PAUSE - BEGINNING
        self._drafting = self._attempt = 0  # steps with drafts since one without, and left of an attempt

    def next(self) -> int:
        """How many drafts the next step has."""
        found = self._next() if self._counts and self._known.begun else 0
        self._drafting = self._drafting + 1 if found else 0
        return found

    def _next(self) -> int:
        best = self._best()
        if best:
            self._pause, self._waited, self._attempt = PAUSE, 0, 0
            return 0 if self._drafting >= AGAIN else best
        if not self._attempt:
            if self._waited < self._pause:
                self._waited += 1
                return 0
            self._pause, self._waited, self._attempt = min(2 * self._pause, LONGEST_PAUSE), 0, ATTEMPT
            self._known.keep(_KEPT_OF_PAUSE)
        self._attempt -= 1
        timed = [count for count in self._counts if count in self._known.seconds]
        return max(timed, key=lambda count: self._speed(count, _RIGHT), default=self._counts[0])

    def note(self, drafts: int, right: int, seconds: float | None) -> None:
        """After a step.

        Args:
            drafts: that it had.
            right: how many of them were right.
            seconds: that it took; None if it did what other steps do not, such as a capture.
        """
        self._known.note(drafts, right, seconds)

    def _best(self) -> int:
        """The number of drafts that gives the most tokens a second; 0 if drafts do not pay."""
        share = self._known.right / self._known.seen
        counts = self._counts
        if 0 < self._known.steps < _BEFORE_ANOTHER:
            counts = [count for count in counts if count in self._known.seconds] or counts
        best = max(counts, key=lambda count: self._speed(count, share))
        return best if self._speed(best, share) > self._speed(0, share) else 0

    def _speed(self, drafts: int, share: float) -> float:
        """Tokens a second, as expected if this share of drafts is right."""
        return sum(share**place for place in range(drafts + 1)) / max(self._time(drafts), 1e-9)

    def _time(self, drafts: int) -> float:
        """Seconds of a step; of one that was not timed, estimated from those that were."""
        seconds = self._known.seconds
        if drafts in seconds:
            return seconds[drafts]
        plain = seconds[0]
        timed = [count for count in self._counts if count in self._known.seconds]
        if not timed:
            return plain * (1 + _ADDED * drafts)
        near = min(timed, key=lambda count: abs(count - drafts))
        return plain + (seconds[near] - plain) * min(1.0, drafts / near)
