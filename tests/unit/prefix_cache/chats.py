"""Conversations with the tiny model, and the same prompts read by a model without ``reuse_prefix``."""

from __future__ import annotations

import random
import types
from typing import Any

import gemma4_compat
from gemma4_compat._generation.prefix_cache import rows, session

NEW = 5


def text(length: int, seed: int) -> Any:
    """Tokens of text, int64 [1, length]."""
    import torch

    return torch.randint(3, 240, (1, length), generator=torch.Generator().manual_seed(seed))


class Recorder:
    """A logits processor that changes nothing. What ``generate`` returns would have the cache, which is then yours."""

    def __init__(self) -> None:
        self.logits: list[Any] = []

    def __call__(self, _input_ids: Any, scores: Any) -> Any:
        self.logits.append(scores.clone())
        return scores


def ask(model: Any, ids: Any, *, new: int = NEW, **options: Any) -> Any:
    """Tokens and logits of a greedy ``generate`` of exactly ``new`` tokens."""
    import torch
    from transformers import LogitsProcessorList

    recorder = Recorder()
    batch = {"input_ids": ids.to(model.device), "attention_mask": torch.ones_like(ids).to(model.device)}
    asked = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None}
    asked |= {"logits_processor": LogitsProcessorList([recorder])}
    return types.SimpleNamespace(sequences=model.generate(**{**batch, **asked, **options}), logits=recorder.logits)


def reusing(model: Any) -> Any:
    """With ``reuse_prefix`` and nothing else of ``decode_fast``."""
    return gemma4_compat.decode_fast(model, reuse_prefix=True, graphs=False)


def counted(model: Any) -> tuple[int, int]:
    """How many tokens of prompts were read, and reused."""
    found = gemma4_compat.statistics(model).decoding
    return found.prompt_tokens_read, found.prompt_tokens_reused


def reused(model: Any, ids: Any, **options: Any) -> tuple[Any, int]:
    """What ``ask`` returns, and how many tokens of the prompt were reused."""
    read, before = counted(model)
    found = ask(model, ids, **options)
    now = counted(model)
    assert now[0] + now[1] - read - before in (0, ids.shape[1])
    return found, now[1] - before


def near(one: Any, other: Any) -> None:
    """In float32: the same tokens, and logits that only round differently."""
    import torch

    assert torch.equal(one.sequences, other.sequences)
    for pair in zip(one.logits, other.logits, strict=True):
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-4)


def edited(ids: Any, held: int, draw: random.Random) -> Any:
    """The next prompt of a conversation, as people go on: mostly at its end.

    Args:
        ids: all that was said, int64 [1, length].
        held: tokens of the prompt before.
        draw: what happens.
    """
    import torch

    more = text(draw.randrange(1, 14), draw.randrange(1000))
    kept = {
        "goes on": ids.shape[1],
        "asks for another answer": held,
        "asks for another answer to another question": max(held - draw.randrange(1, 9), 1),
        "edits the end of an answer": ids.shape[1] - draw.randrange(1, NEW),
        "edits anything": draw.randrange(1, ids.shape[1]),
    }
    what = draw.choice(["goes on", "goes on", "goes on", *kept])
    if what == "asks for another answer":
        return ids[:, :held]
    return torch.cat([ids[:, : kept[what]], more], dim=-1)


def small(monkeypatch: Any, slack: int = 2) -> None:
    """Constants for windows of 8 tokens."""
    monkeypatch.setattr(rows, "SLACK", slack)
    monkeypatch.setattr(session, "LEAST", 1)
