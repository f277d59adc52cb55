"""``reuse_prefix`` with ``decode_fast``: static caches that grow and are cut, and the graphs that hold them."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("bitsandbytes", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")

import gemma4_compat
from gemma4_compat._generation.prompts import buckets
from gemma4_compat._graphs import deferred_stop, static_caches
from tests.unit.generation.calls import Models, base, steps
from tests.unit.generation.calls import text as batch_of
from tests.unit.prefix_cache import chats
from tests.unit.prefix_cache.chats import NEW, ask, counted, near, reused, text

pytestmark = pytest.mark.usefixtures("tapes")
WAYS: dict[str, dict[str, bool]] = {"own": {}, "exact": {"exact": True}, "any length": {"any_length": True}}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    chats.small(monkeypatch)
    monkeypatch.setattr(buckets, "SIZES", (4, 16))
    monkeypatch.setattr(buckets, "SMALL", 16)
    monkeypatch.setattr(buckets, "UNIT", 64)


def fast(models: Models, *where: Any, **way: bool) -> Any:
    return gemma4_compat.decode_fast(models.fresh(*where), reuse_prefix=True, **way)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_one_cache_serves_all_turns_until_it_has_to_grow(models: Models, way: dict[str, bool]) -> None:
    import torch

    model, plain = fast(models, None, **way).float(), models.fresh(None).float()
    gemma4_compat.decode_fast(plain, enabled=False)
    ids, lengths, captured = text(20, 0), [], []
    for turn in range(11):
        found, held = reused(model, ids)
        near(found, ask(plain, ids))
        assert held == (0 if turn == 0 else ids.shape[1] - 7)
        lengths.append(static_caches.length(kept(model)._cache))
        captured.append(steps(model).captured)
        ids = torch.cat([found.sequences.cpu(), text(6, turn + 1)], dim=-1)
    assert lengths == [64] * 4 + [128] * 6 + [192]
    assert steps(model).reasons == ()
    assert steps(model).replayed > 9 * (NEW - 2)
    assert captured[3] == captured[1], "no capture for a cache of the same length"
    assert captured[8] == captured[5]


def kept(model: Any) -> Any:
    from gemma4_compat._generation.prefix_cache import session

    found = session.of(base(model))
    assert found is not None
    return found._last


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_histories_that_are_edited(models: Models, way: dict[str, bool]) -> None:
    model, plain = fast(models, None, **way).float(), models.fresh(None).float()
    gemma4_compat.decode_fast(plain, enabled=False)
    for seed in range(3):
        draw = random.Random(seed)
        ids = text(draw.randrange(2, 30), seed)
        for _ in range(8):
            found = ask(model, ids)
            near(found, ask(plain, ids))
            ids = chats.edited(found.sequences.cpu(), ids.shape[1], draw)
    read, held = counted(model)
    assert held > read
    assert steps(model).reasons == ()
    assert steps(model).replayed > 0


def test_another_conversation_takes_over_memory_and_graphs(models: Models) -> None:
    model = fast(models, "4bit")
    for seed in range(4):
        ask(model, text(20, seed))
    assert counted(model)[1] == 0
    assert steps(model).captured <= 2, "a graph before, and one after the window is full"


@pytest.mark.parametrize(
    ("quantization", "adapter", "where"), [("4bit", "language", "device"), ("4bit", None, "streamed")]
)
def test_quantized_adapted_and_offloaded(models: Models, quantization: str, adapter: str | None, where: str) -> None:
    import torch

    model, other = (fast(models, quantization, adapter, where) for _ in range(2))
    gemma4_compat.decode_fast(other)
    ids = text(20, 0)
    for turn in range(3):
        found, held = reused(model, ids)
        assert held == (0 if turn == 0 else ids.shape[1] - 4)
        torch.testing.assert_close(found.logits[0], ask(other, ids).logits[0], rtol=0.1, atol=0.5)
        ids = torch.cat([found.sequences.cpu(), text(3, turn + 1)], dim=-1)
    assert steps(model).replayed > 0
    assert steps(model).reasons == ()


def test_a_text_that_ends_before_its_limit(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host learns of the end one step late, so the cache holds one token more."""
    import torch

    monkeypatch.setattr(deferred_stop, "WAITING", float("inf"))
    model, plain = fast(models, None).float(), models.fresh(None).float()
    gemma4_compat.decode_fast(plain, enabled=False)
    options = {"max_new_tokens": 12, "do_sample": False}
    ids = text(20, 0)
    for turn in range(4):
        end = plain.generate(ids, **options, eos_token_id=None)[0, ids.shape[1] + 6].item()
        said, expected = (one.generate(ids, **options, eos_token_id=end) for one in (model, plain))
        assert torch.equal(said, expected)
        ids = torch.cat([said, text(5, turn)], dim=-1)
    read, held = counted(model)
    assert held > read
    assert steps(model).replayed > 0


def test_a_call_between_two_turns_has_a_cache_of_its_own(models: Models) -> None:
    """Before transformers 5.15 a model keeps its last static cache, and empties it for the next call."""
    import torch

    model, plain = fast(models, None).float(), models.fresh(None).float()
    gemma4_compat.decode_fast(plain, enabled=False)
    ids = ask(model, text(20, 0))
    ids = ask(model, ids.sequences).sequences
    padded = {name: row[1:] for name, row in batch_of(model, 12, batch=2).items()}
    for _ in range(2):
        said = [one.generate(**padded, max_new_tokens=4, do_sample=False) for one in (model, plain)]
        assert torch.equal(*said)
        found, held = reused(model, ids)
        near(found, ask(plain, ids))
        assert held == ids.shape[1] - 1
        ids = found.sequences
