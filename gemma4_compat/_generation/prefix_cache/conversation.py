"""A text that a cache holds, and how both are cut."""

from __future__ import annotations

import itertools
from typing import Any

from gemma4_compat._gemma4.models.media import Item
from gemma4_compat._generation.prefix_cache import rows

#: Places in a text to which sliding layers can be cut: their rows there are copied.
MAX_COPIES = 3


class Conversation:
    """The tokens that a cache holds, and their keys and values.

    Args:
        ids: the tokens, int64 [length], on the CPU.
        items: its images and sounds.
        seen: from ``weights.seen``, when they were read.
        cache: holds the tokens. A static one is kept; otherwise its rows are.
        copies: of rows of sliding layers.
        window: of sliding layers, in tokens.
        returned: whether the caller has the cache as well, and may write to it.
    """

    def __init__(
        self,
        ids: Any,
        items: list[Item],
        seen: tuple[Any, ...],
        cache: Any,
        copies: list[rows.Layers],
        window: int,
        *,
        returned: bool = False,
    ) -> None:
        self.ids, self.items, self.seen, self.window = ids, items, seen, window
        self._sliding = rows.sliding(cache)
        self._cache = cache if rows.length(cache) is not None else None
        self._rows = {} if self._cache is not None else rows.of(cache)
        self.copies = copies
        self._values = rows.digest(self._rows) if returned else None
        self._devices: dict[int, Any] = {}  # of layers, while their rows are in host memory

    @property
    def layers(self) -> rows.Layers:
        """Its rows, as views where a cache has them."""
        return self._rows or rows.of(self._cache)

    def grow(self, ids: Any, layers: rows.Layers) -> None:
        """Hold a longer text, int64 [length], on the CPU, whose rows these are."""
        self.ids, self._rows, self._cache = ids, layers, None

    def is_untouched(self) -> bool:
        """Whether nobody has written to the rows, which the caller may have as well."""
        return self._values is None or rows.digest(self._rows) == self._values

    def common(self, ids: Any, items: list[Item]) -> int:
        """How many tokens begin both this text and another, of which at least one token is left to read.

        Args:
            ids: of the other text, int64 [length], on the CPU.
            items: its images and sounds.
        """
        most = min(len(self.ids), len(ids) - 1)
        differing = (self.ids[:most] != ids[:most]).nonzero()
        found = int(differing[0]) if len(differing) else most
        for own, other in itertools.zip_longest(self.items, items):
            if own != other:  # from there on, the same placeholders stand for something else
                found = min(found, *(item.start for item in (own, other) if item is not None))
                break
        return found

    def longest(self, limit: int) -> int:
        """The longest beginning of this text, of at most ``limit`` tokens, that the layers can be cut to.

        It ends outside of images and sounds, whose tokens may see each other.
        """
        own = self.layers
        while limit > 0:
            found = limit
            for index in self._sliding:
                parts = [layers[index] for layers in (own, *self.copies) if index in layers]
                found = rows.longest([(part.start, part.end) for part in parts], self.window, found)
            inside = next((item for item in self.items if item.start < found < item.end), None)
            if inside is not None:
                found = inside.start
            if found == limit:
                break
            limit = found  # which every layer has to allow
        return limit

    def cut(self, tokens: int, fresh: Any, needed: int) -> Any:
        """A cache that holds the first tokens of this text, which ends here.

        Args:
            tokens: from :meth:`longest`.
            fresh: an empty cache of the kind that is asked for. If the cache of this text has room for what is
                needed, it is returned in place of a static one.
            needed: tokens that it must have room for.
        """
        own = self.layers
        start = max(tokens - self.window + 1, 0)
        copies = {index: self._joined(own, index, start, tokens) for index in self._sliding}
        held, self.ids = len(self.ids), self.ids[:tokens]
        self.items = [item for item in self.items if item.start < tokens]
        self._keep(copies, tokens)
        room = rows.length(fresh)
        if room is not None and self._cache is not None and (rows.length(self._cache) or 0) >= needed:
            if tokens != held:
                rows.cut(self._cache, copies, tokens)
            return self._cache
        for index in sorted(own):  # a layer at a time has its rows twice
            held_rows = own.pop(index)
            rows.fill(fresh, index, copies[index] if index in copies else held_rows.between(0, tokens), tokens)
        return fresh

    @property
    def nbytes(self) -> int:
        """Bytes of its rows."""
        return sum(one.nbytes for layers in (self.layers, *self.copies) for one in layers.values())

    def move_to_host(self) -> None:
        """Have its rows in host memory, so that its cache is free."""
        if not self._devices:
            own = self.layers
            self._devices = {index: one.keys.device for index, one in own.items()}
            self._rows = {index: one.copied("cpu") for index, one in own.items()}
            self.copies = [{index: one.copied("cpu") for index, one in layers.items()} for layers in self.copies]
            self._cache = None

    def move_back(self) -> None:
        """Have its rows where they were before :meth:`move_to_host`."""
        devices, self._devices = self._devices, {}
        if devices:
            self._rows = {index: one.copied(devices[index]) for index, one in self._rows.items()}
            self.copies = [{i: one.copied(devices[i]) for i, one in layers.items()} for layers in self.copies]

    def _joined(self, own: rows.Layers, index: int, start: int, end: int) -> rows.Rows:
        parts = [layers[index] for layers in (own, *self.copies) if index in layers]
        return rows.joined(parts, start, end)

    def _keep(self, copies: rows.Layers, tokens: int) -> None:
        """Keep the rows at the cut, and of the others those before it."""
        before = [
            {i: one.between(one.start, min(one.end, tokens)) for i, one in layers.items() if one.start < tokens}
            for layers in self.copies
        ]
        self.copies = tidied([*filter(None, before), copies])


def tidied(copies: list[rows.Layers]) -> list[rows.Layers]:
    """The last of these, without those whose rows others have as well."""

    def span(layers: rows.Layers) -> tuple[int, int]:
        return next(((one.start, one.end) for one in layers.values()), (0, 0))

    found: list[rows.Layers] = []
    for layers in copies:
        start, end = span(layers)
        if any(span(other)[0] <= start and end <= span(other)[1] for other in found):
            continue
        found = [other for other in found if not (start <= span(other)[0] and span(other)[1] <= end)]
        found.append(layers)
    return found[-MAX_COPIES:]
