"""Sliding layers for speculative steps with drafts: a window and some room, so that rejected drafts are overwritten.

A full sliding layer of a static cache drops its first row for each new one, and nothing brings that row back. Here the
rows of such layers have memory of their own, in the order of the text, from the position ``base`` on. A step writes
the rows of its tokens after those that are held; the next step overwrites those of rejected drafts, so that taking
them back is only a matter of what the host counts. Where there is no more room, the last window moves to the front.

The keys of a token are contiguous and in order, as they are in the layer itself: :mod:`attention` has the same bits.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from gemma4_compat._generation.prompts.prompts import MASKS
from gemma4_compat._graphs import static_caches
from gemma4_compat._memory.formulas import draft_rows


class Windows:
    """The rows of the sliding layers of a cache, and which keys tokens attend to.

    Args:
        cache: a static cache that has read something.
        reach: how many keys a token attends to in a sliding layer, including its own.

    Attributes:
        slots: positions of a sliding layer of the cache.
        begin: the position of the first row, as the host knows it.
    """

    def __init__(self, cache: Any, reach: int) -> None:
        import torch

        layers = static_caches.sliding(cache)
        self.slots, self._reach, self.begin = static_caches.window(cache), reach, 0
        self._rows = draft_rows(self.slots)
        with torch.inference_mode(False), torch.no_grad():
            self._held = [tuple(map(self._roomy, (layer.keys, layer.values))) for layer in layers]
            self._base = torch.zeros((), dtype=torch.long, device=layers[0].keys.device)
        self._positions = static_caches.length(cache)

    def _roomy(self, tensor: Any) -> Any:
        return tensor.new_zeros((*tensor.shape[:2], self._rows, tensor.shape[3]))

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where all tensors are."""
        held = [tensor for pair in self._held for tensor in pair]
        return static_caches.addresses((*held, self._base))

    def take(self, cache: Any, held: int) -> None:
        """Take the windows of a cache.

        Args:
            cache: of the same shapes; it has read a prompt.
            held: how many tokens it holds.
        """
        for layer, pair in zip(static_caches.sliding(cache), self._held, strict=True):
            for rows, tensor in zip(pair, (layer.keys, layer.values)):
                rows[:, :, : self.slots].copy_(tensor)
        self._move_base(max(held - self.slots, 0))

    def make_room(self, held: int, tokens: int) -> None:
        """Before a step with so many tokens: move the last window to the front if there is no room for them."""
        if self.has_room(held + tokens):
            return
        start = held - self.slots - self.begin
        for pair in self._held:
            for rows in pair:
                rows[:, :, : self.slots].copy_(rows[:, :, start : start + self.slots].clone())
        self._move_base(held - self.slots)

    def has_room(self, tokens: int) -> bool:
        """Whether the first so many tokens of the text fit without moving the last window."""
        return tokens - self.begin <= self._rows

    def _move_base(self, begin: int) -> None:
        self.begin = begin
        self._base.fill_(begin)

    @contextlib.contextmanager
    def written(self, cache: Any, positions: Any) -> Iterator[None]:
        """Inside, updates write the tokens at these positions, (tokens,), and no layer counts them."""
        sliding = static_caches.sliding(cache)
        with contextlib.ExitStack() as stack:
            for layer, pair in zip(sliding, self._held, strict=True):
                function = functools.partial(_write, pair, positions - self._base)
                stack.enter_context(static_caches.overridden([layer], "update", function))
            for layer in static_caches.holding(cache):
                if not any(layer is other for other in sliding):
                    function = functools.partial(_write, (layer.keys, layer.values), positions)
                    stack.enter_context(static_caches.overridden([layer], "update", function))
            yield

    def masks(self, positions: Any) -> dict[str, Any]:
        """What the tokens at these positions, (tokens,), attend to: (1, 1, tokens, keys) for each kind of layer."""
        every, near = self._keys(positions)
        at = positions[:, None]
        found = (every <= at), (near <= at) & (at - near < self._reach)
        return {kind: mask[None, None] for kind, mask in zip(MASKS, found)}

    def drafting_masks(self, held: Any) -> dict[str, Any]:
        """What an assistant attends to: keys in its reach, as in transformers. ``held``: how many tokens there are."""
        every, near = self._keys(held)
        found = every < held, (near < held) & (held - 1 - near <= self._reach)
        return {kind: mask[None, None, None] for kind, mask in zip(MASKS, found)}

    def _keys(self, tensor: Any) -> tuple[Any, Any]:
        """The positions of the keys of full layers and of the windows, on the device of a tensor."""
        import torch

        every = torch.arange(self._positions, device=tensor.device)
        return every, torch.arange(self._rows, device=tensor.device) + self._base

    def shared(self, cache: Any, types: list[str]) -> dict[str, tuple[Any, Any]]:
        """The keys and values of the last layer of each kind that has its own.

        Args:
            cache: whose windows these are.
            types: the kinds of the layers that have keys of their own, in order.
        """
        sliding = static_caches.sliding(cache)
        held = {id(layer): pair for layer, pair in zip(sliding, self._held, strict=True)}
        layers = dict(zip(types, static_caches.holding(cache)))
        return {kind: held.get(id(layer)) or (layer.keys, layer.values) for kind, layer in layers.items()}

    def changes(self, cache: Any, held: int, tokens: int) -> list[Any]:
        """The rows of so many tokens after those that are held, as views."""
        sliding = {id(layer) for layer in static_caches.sliding(cache)}
        full = [(layer.keys, layer.values) for layer in static_caches.holding(cache) if id(layer) not in sliding]
        found = [tensor[:, :, held : held + tokens] for pair in full for tensor in pair]
        start = held - self.begin
        return found + [rows[:, :, start : start + tokens] for pair in self._held for rows in pair]


def _write(
    held: tuple[Any, Any], slots: Any, _layer: Any, _below: Any, keys: Any, values: Any, *_args: Any, **_kwargs: Any
) -> tuple[Any, Any]:
    for rows, new in zip(held, (keys, values)):
        rows.index_copy_(2, slots, new.to(rows.dtype))
    return held
