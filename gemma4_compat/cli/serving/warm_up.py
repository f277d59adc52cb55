"""What a server does before the first request and between others: the first answers would wait for it otherwise.

It reads prompts of each size and writes texts that nobody asked for, so that the steps of a text are captured and
fused. That is cut into pieces of a second or a few, and requests that come meanwhile are answered before the next one.
Where steps are not replayed there is nothing to do.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from typing import Any

from transformers import StoppingCriteria

from gemma4_compat._generation import continuous
from gemma4_compat._generation.prompts import buckets
from gemma4_compat._graphs import decoder, fused_steps
from gemma4_compat.cli.serving import requests
from gemma4_compat.cli.serving.loading import Served

#: Tokens of a text: after so many its steps are fused, whatever has to be compiled.
_TOKENS = fused_steps.Progress.after + 8
_SPOKEN = "Hello."
#: Beyond every vocabulary, so that no text ends early.
_NEVER = 1 << 30


class _Enough(StoppingCriteria):  # type: ignore[misc]
    """Ends a text when its steps are fused, or somebody waits.

    Args:
        served: the model.
        waiting: who waits.
    """

    def __init__(self, served: Served, waiting: Collection[Any]) -> None:
        self._counted, self._waiting = decoder.of(served.base).statistics, waiting
        self._fused = self._counted.fused

    @property
    def is_reached(self) -> bool:
        return bool(self._waiting) or self._counted.fused > self._fused

    def __call__(self, input_ids: Any, _scores: Any, **_kwargs: Any) -> Any:
        import torch

        return torch.full((len(input_ids),), self.is_reached, dtype=torch.bool, device=input_ids.device)


def make_room(served: Served) -> None:
    """Have room for the graphs of the base and of each adapter."""
    steps = decoder.of(served.base).steps
    steps.limit = max(steps.limit, decoder.MAX_GRAPHS * min(len(served.names), decoder.MAX_STATES))


def prompts(served: Served, **options: Any) -> Iterator[None]:
    """Read prompts of each size with the base and each adapter, and these options of ``generate``."""
    sizes = [size for size in buckets.SIZES if size <= min(buckets.SMALL, served.plan.context - 2)]
    for adapter in served.names.values() if decoder.is_preferred(served.base) else ():
        for size in sizes:
            for _ in range(decoder.CAPTURE_AT):
                _generate(served, adapter, size + 1, 1, **options)
            for calls in (decoder.of(served.base).steps, decoder.of(served.base).prompts):
                for graph in calls.graphs():
                    graph.progress.hasten()
            _generate(served, adapter, size + 1, 1, **options)
            yield


def texts(served: Served, waiting: Collection[Any]) -> Iterator[None]:
    """Write texts with the base and each adapter: as by default, greedily, and beyond the sliding windows.

    Each ends when somebody is ``waiting``.
    """
    window, context = int(served.base.config.get_text_config().sliding_window), served.plan.context
    for adapter in served.names.values() if decoder.is_preferred(served.base) else ():
        for greedy in (False, True):
            _generate(served, adapter, 1, _TOKENS, greedy=greedy, stopping_criteria=[_Enough(served, waiting)])
            yield
        if context > window + 1:
            _generate(served, adapter, window + 1, _TOKENS, stopping_criteria=[_Enough(served, waiting)])
            yield


def batches(served: Served, waiting: Collection[Any], batch: continuous.Batch, words: int) -> Iterator[None]:
    """Decode each number of texts with the base and each adapter.

    Args:
        served: the model.
        waiting: who ends a piece.
        batch: without texts before and after each piece.
        words: that matter for each token.
    """
    for adapter in served.names.values():
        for rows in batch.sizes:
            with served.speaking(adapter):
                _step(served, adapter, waiting, batch, rows, words)
            yield


def _generate(
    served: Served, adapter: str | None, tokens: int, most: int, *, greedy: bool = False, **options: Any
) -> Any:
    """Write a text after so many tokens, and return the conversation."""
    inputs = _prompt(served, tokens)
    config = copy.deepcopy(served.base.generation_config)
    config.max_new_tokens, config.max_length = max(min(most, served.plan.context - tokens), 1), None
    config.eos_token_id, config.prefill_chunk_size = [_NEVER], served.plan.prefill_chunk
    config.pad_token_id = config.pad_token_id or 0  # or transformers chooses one, and says so
    if greedy:
        requests.choose_likeliest(config)
    served.generate(adapter, inputs, generation_config=config, **options)
    return None if served.conversations is None else served.conversations.take()


def _step(
    served: Served, adapter: str | None, waiting: Collection[Any], batch: continuous.Batch, rows: int, words: int
) -> None:
    """Decode so many texts until that is enough."""
    import torch

    tokens = 1
    conversation = _generate(served, adapter, tokens, 1)
    if conversation is None:
        return
    enough = _Enough(served, waiting)
    try:
        for _ in range(rows):
            batch.join(conversation.layers, tokens)
        new = _prompt(served, rows)["input_ids"][0].to(served.base.device)
        for _ in range(min(_TOKENS, served.plan.context - tokens)):
            with torch.no_grad():
                new = batch.step(new, words).argmax(dim=-1)
            if enough.is_reached:
                break
    finally:
        while batch.lengths:
            batch.leave(len(batch.lengths) - 1)


def _prompt(served: Served, tokens: int) -> dict[str, Any]:
    """So many tokens of text."""
    import torch

    found = served.tokenizer.encode(_SPOKEN) or [0]
    ids = torch.tensor([(found * tokens)[:tokens]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
