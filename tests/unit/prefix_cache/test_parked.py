"""Several conversations with one model: host memory holds all but the last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("bitsandbytes", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")

import gemma4_compat
from gemma4_compat._generation.prefix_cache import parked
from gemma4_compat._generation.prefix_cache.parked import Conversations
from gemma4_compat._lab.trained import Trained

FIRST = {"fox": "How many legs has a fox?", "snow": "What colour is snow?", "sky": "Why is the sky blue?"}
NEXT = "How many legs has a spider?"


@pytest.fixture(scope="module")
def trained() -> Trained:
    return Trained.find()


@pytest.fixture(scope="module")
def loaded(trained: Trained) -> Any:
    return trained.load()


@pytest.fixture
def model(loaded: Any) -> Iterator[Any]:
    yield gemma4_compat.decode_fast(loaded, reuse_prefix=True, graphs=False)
    gemma4_compat.decode_fast(loaded, enabled=False)


class Chats:
    """Chats with a model that keeps conversations."""

    def __init__(self, trained: Trained, model: Any, limit: int, **options: Any) -> None:
        self.kept = Conversations(model, limit)
        self._trained, self._model, self._options = trained, model, options

    def say(self, *said: str, adapter: str | None = None) -> tuple[str, int]:
        """The answer, and how many tokens of the prompt were not read."""
        before = gemma4_compat.statistics(self._model).decoding.prompt_tokens_reused
        self.kept.turn_to(adapter, self._trained.prompt(*said))
        answer = self._trained.answer(self._model, *said, max_new_tokens=48, **self._options)
        return answer, gemma4_compat.statistics(self._model).decoding.prompt_tokens_reused - before


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
def test_each_goes_on_with_the_bits_of_one_that_never_left(trained: Trained, model: Any, options: Any) -> None:
    alone = {}
    for name, question in FIRST.items():
        chats = Chats(trained, model, 0, **options)
        answer, reused = chats.say(question)
        assert reused == 0
        alone[name] = [answer, *chats.say(question, answer, NEXT)]
        chats.kept.forget()
    chats = Chats(trained, model, 1 << 30, **options)
    first = {name: chats.say(question) for name, question in FIRST.items()}
    assert {name: (alone[name][0], 0) for name in FIRST} == first
    for name, question in FIRST.items():
        answer, reused = chats.say(question, first[name][0], NEXT)
        assert [answer, reused] == alone[name][1:]
        assert reused > len(question)


def test_what_merely_begins_alike_is_read_from_the_beginning(trained: Trained, model: Any) -> None:
    chats = Chats(trained, model, 1 << 30)
    chats.say(FIRST["fox"])
    assert chats.say(FIRST["fox"])[1] == 0
    assert chats.say(FIRST["fox"] + " And why?")[1] == 0


def test_another_adapter_is_another_conversation(trained: Trained, model: Any) -> None:
    chats = Chats(trained, model, 1 << 30)
    answer, _ = chats.say(FIRST["fox"])
    assert chats.say(FIRST["fox"], answer, NEXT, adapter="pirate")[1] == 0
    assert chats.say(FIRST["fox"], answer, NEXT)[1] > 0


def test_the_oldest_ones_have_no_room(trained: Trained, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chats = Chats(trained, model, 1 << 30)
    first = {name: chats.say(question)[0] for name, question in FIRST.items()}
    sizes = [one.conversation.nbytes for one in chats.kept._parked]
    assert len(sizes) == 2
    chats.kept._limit = max(sizes) + min(sizes) // 2
    chats.say("Tell of a frog and a mole.")
    assert chats.say(FIRST["fox"], first["fox"], NEXT)[1] == 0
    chats.kept.forget()
    assert chats.say(FIRST["sky"], first["sky"], NEXT)[1] == 0
    monkeypatch.setattr(parked, "MOST", 1)
    chats.kept._limit = 1 << 30
    for question in (*FIRST.values(), NEXT):
        chats.say(question)
    assert len(chats.kept._parked) == 1


def test_without_memory_it_is_read_from_the_beginning(
    trained: Trained, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from gemma4_compat._generation.prefix_cache.conversation import Conversation

    def failing(_self: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    chats = Chats(trained, model, 1 << 30)
    first = {name: chats.say(FIRST[name])[0] for name in ("fox", "snow")}
    monkeypatch.setattr(Conversation, "move_back", failing)
    assert chats.say(FIRST["fox"], first["fox"], NEXT)[1] == 0
