"""Which queries of a sliding layer are computed with which keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

#: Queries and keys. The largest tile of a kernel (of keys, PyTorch's on the CPU).
UNIT = 512


@dataclass(frozen=True)
class Layout:
    """Which queries are computed with which keys. The last query is at the last key.

    Attributes:
        unit: see :data:`UNIT`; a block in those of :mod:`products`, whose blocks may have keys that are not there.
        block: queries of a block, a multiple of the unit.
        queries: number of queries.
        keys: number of keys.
        start: the first key of the first block, a multiple of the unit. It may be negative.
        width: keys of a block, a multiple of the unit.
        first: the first block whose queries and keys are all there. One call computes those before it,
        last: and one call the queries from this block on. One more computes the blocks between, each as a row.
    """

    unit: int
    block: int
    queries: int
    keys: int
    start: int
    width: int
    first: int
    last: int

    @classmethod
    def of(cls, window: int, block: int, queries: int, keys: int, after: int) -> Layout | None:
        """None if that takes more than half of the scores of one call. ``after``: keys after a block."""
        before, unit = keys - queries, UNIT
        if before < 0:
            return None
        start = (before - window + 1) // unit * unit
        width = -(-(before + block + after - start) // unit) * unit
        # A rest is computed together with a block: kernels treat few queries differently.
        last = min(queries // block - (queries % block > 0), (keys - width - start) // block + 1)
        found = cls(unit, block, queries, keys, start, width, max(0, -(start // block)), last)
        return None if found.count < 1 or 2 * found.scores() > queries * keys else found

    @property
    def count(self) -> int:
        """How many blocks are rows of one call."""
        return self.last - self.first

    @property
    def head(self) -> tuple[slice, slice]:
        """Queries and keys of the call for what comes before these."""
        stop = self.start + (self.first - 1) * self.block + self.width
        return slice(0, self.first * self.block), slice(0, max(0, stop) if self.first else 0)

    @property
    def tail(self) -> tuple[slice, slice]:
        """Queries and keys of the call for what comes after them."""
        begin = self.last * self.block
        return slice(begin, self.queries), slice(self.start + begin if begin < self.queries else self.keys, self.keys)

    def middle(self) -> Iterator[tuple[slice, slice]]:
        """Queries and keys of each of these blocks."""
        for at in range(self.first * self.block, self.last * self.block, self.block):
            yield slice(at, at + self.block), slice(self.start + at, self.start + at + self.width)

    def __iter__(self) -> Iterator[tuple[slice, slice]]:
        yield self.head
        yield from self.middle()
        yield self.tail

    def scores(self) -> int:
        return sum((query.stop - query.start) * (key.stop - key.start) for query, key in self)
