"""Continuous batching: texts that are decoded together, and begin and end at different times.

The texts are rows of one static cache. The newest token of each is in the same slot, and slots before a shorter text
are masked, as for a batch that is padded on the left. So a text that joins is copied to where it ends with the rest,
and one that leaves gives its row to the last one: no graph is captured for either. The custom kernels compute each row
by itself, from the first valid key of its mask on, so its bits are those of ``generate`` for this text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gemma4_compat._gemma4.cache import cache_names
from gemma4_compat._generation import call, experts_alone
from gemma4_compat._generation.prefix_cache import rows
from gemma4_compat._graphs import decoder, deferred_stop, static_caches, step_inputs

#: Slots beyond those of the longest text: only after so many tokens are all rows moved back.
_SPARE = 256


def unsupported_reason(model: Any) -> str | None:
    """Why the texts of a batch of this model would not have the bits that each has by itself.

    Args:
        model: of transformers, after ``decode_fast``.
    """
    from gemma4_compat._kernels.match import custom

    if not decoder.is_preferred(model) or not decoder.of(model).custom:
        return "PyTorch's kernels round rows of a batch differently"
    return custom.unsupported_reason(model.device) or experts_alone.unsupported_reason(model)


class Batch:
    """Texts that are decoded together.

    Args:
        model: of transformers, for which :func:`unsupported_reason` is None.
        most: rows at most.
        context: tokens of each text at most, with its answer.

    Attributes:
        lengths: tokens that the cache holds of each text, by row.
    """

    def __init__(self, model: Any, most: int, context: int) -> None:
        self._model, self._most = model, most
        self._window = int(model.config.get_text_config().sliding_window)
        self._room = max(context, self._window) + _SPARE
        self._end = 0  # the slot after the newest tokens
        self._caches: dict[int, Any] = {}  # by rows
        self._decoder: Any = None
        self._given: dict[str, Any] | None = None  # the last inputs, unless rows have changed
        self._inputs: step_inputs.Inputs | None = None  # those, as they advance
        self._words: int | str = ""  # of the last step
        self.lengths: list[int] = []

    def join(self, layers: rows.Layers, tokens: int) -> int:
        """Add a text, and return its row. If this raises, all texts may be lost: do not use the batch any more.

        Args:
            layers: its keys and values, [1, heads, tokens, width]; of sliding layers, the last ones are enough.
            tokens: how many it has.
        """
        self._move(max(tokens, self._window, self._end if self.lengths else 0))
        row = len(self.lengths)
        for index, layer in self._layers(layers):
            own = layers[index]
            end = self._window if rows.is_sliding(layer) else self._end
            count = min(own.keys.shape[-2], end)
            for held, new in ((layer.keys, own.keys), (layer.values, own.values)):
                held[row, :, end - count : end].copy_(new[0, :, new.shape[-2] - count :])
        self.lengths.append(tokens)
        self._given = None
        return row

    def leave(self, row: int) -> None:
        """Remove the text of this row, which the last text gets."""
        last = len(self.lengths) - 1
        if row != last:
            for layer in static_caches.holding(self._largest):
                for held in (layer.keys, layer.values):
                    held[row].copy_(held[last])
            self.lengths[row] = self.lengths[last]
        self.lengths.pop()
        self._given = None

    def rows_of(self, row: int, tokens: int) -> rows.Layers:
        """Views of the keys and values of a text's first tokens: of all, or of some fewer."""
        found: rows.Layers = {}
        length = self.lengths[row]
        for index, layer in enumerate(self._largest.layers):
            if type(layer).__name__ != "DummyLayer":
                end = self._window if rows.is_sliding(layer) else self._end
                start = end - min(length, end)
                own = (held[row : row + 1, :, start : end - length + tokens] for held in (layer.keys, layer.values))
                found[index] = rows.Rows(length - end + start, *own)
        return found

    def step(self, tokens: Any, words: int | str) -> Any:
        """Read a token of each text.

        Args:
            tokens: int64 [texts], on the model's device.
            words: how many of the best next tokens matter, or why all do: see ``best_words.most``.

        Returns:
            logits, [texts, vocabulary], of the next tokens.
        """
        import torch

        count = len(self.lengths)
        if self._end == self._room:
            self._move(max(*self.lengths, self._window))
        size = min(1 << (count - 1).bit_length(), self._most)
        new = torch.nn.functional.pad(tokens, (0, size - count))[:, None]
        if self._given is None or self._inputs is None or self._inputs.left == 0 or words != self._words:
            self._words = words
            self._begin(size, new)
        else:
            self._inputs.advance(new)
        assert self._given is not None
        with deferred_stop.sampling([], samples=False) as running:
            running.most = words
            logits = self._decoder(**self._given, return_dict=True).logits
        if self._inputs is None:
            self._inputs = step_inputs.Inputs.of(self._given, self._caches[size])
        self._end += 1
        self.lengths = [length + 1 for length in self.lengths]
        return logits[:count, -1]

    @property
    def sizes(self) -> list[int]:
        """Numbers of texts for which steps are captured."""
        return sorted({min(1 << power, self._most) for power in range(self._most.bit_length() + 1)})

    @property
    def _largest(self) -> Any:
        return self._caches[self._most]

    def _layers(self, like: rows.Layers) -> Iterator[tuple[int, Any]]:
        """The layers of the largest cache that have keys of their own, by index; made for keys like these."""
        if not self._caches:
            self._caches = dict(self._made(like))
            self._count()
        for index, layer in enumerate(self._largest.layers):
            if index in like:
                yield index, layer

    def _made(self, like: rows.Layers) -> Iterator[tuple[int, Any]]:
        """Caches by number of rows, all in the memory of the largest one."""
        from transformers import StaticCache

        whole: Any = None
        for size in reversed(self.sizes):
            cache = StaticCache(config=self._model.config.get_text_config(decoder=True), max_cache_len=self._room)
            for index, layer in enumerate(cache.layers):
                if index not in like:
                    continue
                own = whole.layers[index] if whole is not None else None
                empty = like[index].keys[:, :, :0], like[index].values[:, :, :0]
                layer.lazy_initialization(*(part.expand(size, -1, -1, -1) if own is None else part for part in empty))
                if own is not None:
                    layer.keys, layer.values = own.keys[:size], own.values[:size]
                    layer.cumulative_length = own.cumulative_length
                    layer.batch_size = size
            whole = whole or cache
            yield size, cache

    def _move(self, end: int) -> None:
        """Have the texts end at another slot."""
        before, self._end = self._end, end
        if end == before or not self._caches:
            return
        self._given = None
        count, longest = len(self.lengths), max(self.lengths, default=0)
        for layer in static_caches.holding(self._largest):
            if count and not rows.is_sliding(layer):
                for held in (layer.keys, layer.values):
                    held[:count, :, end - longest : end] = held[:count, :, before - longest : before].clone()
        self._count()

    def _count(self) -> None:
        """Have all caches count the tokens that are there."""
        for cache in self._caches.values():
            for layer in static_caches.holding(cache):
                layer.cumulative_length.fill_(self._end)
            for layer in static_caches.sliding(cache):
                layer.cumulative_length_int = self._end

    def _begin(self, size: int, tokens: Any) -> None:
        """Make inputs and a call for the rows that are there now."""
        import torch

        cache, model, count = self._caches[size], self._model, len(self.lengths)
        self._count()
        lengths = torch.tensor([length + 1 for length in self.lengths] + [1] * (size - count))
        slots = torch.arange(self._end + 1)
        mask = (slots >= self._end + 1 - lengths[:, None]).long().to(tokens.device)
        given = {
            "attention_mask": mask,
            "position_ids": (mask.cumsum(-1) - 1).clamp_(min=0),
            "next_sequence_length": 1,
            "use_cache": True,
            "logits_to_keep": 1,
            cache_names.of(type(model).forward): cache,
        }
        ids = torch.zeros_like(mask)
        ids[:, -1:] = tokens
        self._given = model.prepare_inputs_for_generation(ids, **given)
        self._inputs, self._decoder = None, call.decoder_for(model, cache)
