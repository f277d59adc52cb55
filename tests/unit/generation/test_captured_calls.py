"""The store of captured calls, without a model: when a call is captured, replayed, evicted, refused."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gemma4_compat._graphs import captured_calls
from gemma4_compat._graphs.captured_calls import Call, CapturedCalls, Known, Pool, State
from gemma4_compat._graphs.recording import RECORDERS
from gemma4_compat._graphs.statistics import Cause, DecodingStatistics, PromptStatistics, Recapture, Statistics

LIMIT = 3


class Guards:
    """A model whose state the test sets."""

    def __init__(self) -> None:
        self.states: list[Any] = []
        self.rest = True
        self.change()

    def change(self) -> None:
        self.states.insert(0, State(SimpleNamespace(check_memory=lambda: True)))

    def check(self, _call: Any, **_how: Any) -> Any:
        return next(iter(self.states), None)

    def rest_holds(self, _call: Any) -> bool:
        return self.rest


class Fake(Call):
    """A call that counts what is done with it."""

    device = SimpleNamespace(type="nowhere")

    def __init__(self, signature: str, where: int = 0, *, reason: str | None = None, room: bool = True) -> None:
        self.signature = self.refused_as = signature
        self.addresses, self.reason, self.room = where, reason, room
        self.done: list[str] = []
        self.noted: list[str] = []

    @property
    def key(self) -> Any:
        return self.addresses, self.signature

    def recapture(self, known: Known) -> Recapture | None:
        return Recapture(Cause.EVICTED, "") if self.key in known.evicted else None

    def unsupported(self, known: Known) -> str | None:
        return self.reason

    def has_room(self, known: Known) -> bool:
        return self.room

    def capture(self, pool: Any) -> Any:
        if self.reason == "fails":
            raise RuntimeError("boom")
        self.done.append(f"captured in {pool.handle}")
        return SimpleNamespace(signature=self.signature, addresses=self.addresses)

    def replay(self, graph: Any, *, prepared: bool = False) -> Any:
        self.done.append("prepared" if prepared else "replayed")
        return self.key

    def starts(self, known: Known, graph: Any) -> bool:
        self.done.append("started")
        return True

    def take_back(self) -> None:
        self.done.append("taken back")

    def note(self, reason: str | BaseException) -> None:
        self.noted.append(str(reason))


class Asked:
    """A store, and what runs eagerly where it says so."""

    def __init__(self, capture_at: int = 2) -> None:
        self.guards, self.statistics = Guards(), DecodingStatistics()
        self.store = CapturedCalls(
            self.guards, capture_at=capture_at, limit=LIMIT, pool=Pool(), statistics=self.statistics
        )

    def __call__(self, call: Fake) -> str:
        if self.store.run(call) is not None:
            return "captured" if len(call.done) == 2 else "replayed"
        if not self.store.refuses(call):
            self.store.has_run(call)
        return "eager"

    def several(self, *signatures: str) -> list[str]:
        return [self(Fake(signature)) for signature in signatures]


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    made: list[int] = []
    recorder: Any = SimpleNamespace(new_pool=lambda: made.append(len(made)) or len(made))
    monkeypatch.setitem(RECORDERS, "nowhere", recorder)
    return made


@pytest.fixture
def asked(pools: list[int]) -> Asked:
    return Asked()


@pytest.mark.parametrize("capture_at", [1, 2, 4])
def test_a_call_that_comes_back_is_captured_in_time(pools: list[int], capture_at: int) -> None:
    asked = Asked(capture_at)
    found = asked.several(*"a" * (capture_at + 2))
    assert found == ["eager"] * (capture_at - 1) + ["captured", "replayed", "replayed"]
    assert (asked.statistics.captured, asked.statistics.replayed) == (1, 3)
    assert asked.statistics.capture_seconds > 0


def test_signatures_are_apart(asked: Asked) -> None:
    assert asked.several(*"abab") == ["eager", "eager", "captured", "captured"]


def test_a_captured_call_serves_one_memory(asked: Asked) -> None:
    asked.several(*"aa")
    assert asked(Fake("a", 1)) == "captured"
    assert asked(Fake("a", 1)) == asked(Fake("a", 0)) == "replayed"


def test_the_least_recently_used_one_goes(asked: Asked) -> None:
    asked.several(*"aabbcc")
    asked.several("a")
    asked.several(*"dd")
    kept = sorted(graph.signature for graph in asked.store.graphs())
    assert kept == ["a", "c", "d"]
    assert asked.statistics.recaptures == {}
    assert asked.several("b") == ["captured"]
    assert asked.statistics.recaptures == {Cause.EVICTED: 1}


def test_those_of_a_state_that_was_left_go_first(asked: Asked) -> None:
    asked.several(*"aa")
    asked.guards.change()
    asked.several(*"bbccdd")
    assert sorted(graph.signature for graph in asked.store.graphs()) == ["b", "c", "d"]


def test_each_state_has_calls_of_its_own(asked: Asked) -> None:
    asked.several(*"aa")
    asked.guards.change()
    assert asked.several(*"aa") == ["eager", "captured"]
    del asked.guards.states[0]
    assert asked.several("a") == ["replayed"]


def test_without_a_state_everything_is_eager(asked: Asked) -> None:
    asked.guards.states.clear()
    assert asked.several(*"aaa") == ["eager"] * 3
    assert not asked.store.refuses(Fake("a"))
    assert asked.store.graph_of(Fake("a")) is None


def test_what_cannot_be_captured_is_asked_once(asked: Asked) -> None:
    call = Fake("a", reason="not supported")
    assert [asked(call) for _ in range(4)] == ["eager"] * 4
    assert call.noted == ["not supported"]
    assert asked.store.refuses(call)
    assert asked.several(*"bb") == ["eager", "captured"]


def test_a_capture_that_fails_is_noted(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fake, "unsupported", lambda *_: None)
    call = Fake("a", reason="fails")
    assert [asked(call) for _ in range(3)] == ["eager"] * 3
    assert call.noted == ["boom"]
    assert asked.statistics.captured == 0


def test_without_room_it_waits(asked: Asked) -> None:
    call = Fake("a", room=False)
    assert [asked(call) for _ in range(3)] == ["eager"] * 3
    assert call.noted == []
    assert asked.several("a") == ["captured"]


def test_an_empty_pool_is_made_anew(asked: Asked, pools: list[int]) -> None:
    asked.several(*"aabb")
    assert len(pools) == 1
    assert asked.store.release()
    assert not asked.store.release()
    assert asked.store.nbytes == 0
    assert asked.several("a") == ["captured"]
    assert len(pools) == 2


def test_some_are_dropped(asked: Asked) -> None:
    asked.several(*"aabb")
    asked.store.drop(lambda graph: graph.signature == "a")
    assert [graph.signature for graph in asked.store.graphs()] == ["b"]


def test_a_graph_is_replayed_again_while_it_is_kept(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    asked.several(*"aa")
    call = Fake("a")
    graph = asked.store.graph_of(call)
    assert asked.store.again(call, graph, prepared=True) == call.key
    assert call.done == ["prepared"]
    monkeypatch.setattr(Fake, "has_settings", lambda _: False)
    assert asked.store.again(call, graph) is None
    monkeypatch.undo()
    asked.guards.change()
    assert asked.store.again(call, graph) is None
    assert call.done == ["prepared"]


@pytest.mark.parametrize("holds", [True, False])
def test_a_replay_may_begin_before_the_look(asked: Asked, holds: bool) -> None:
    call = Fake("a")
    assert asked.store.run_ahead(call) is None
    asked.several(*"aa")
    asked.guards.rest = holds
    assert asked.store.run_ahead(call) == (call.key if holds else None)
    assert call.done == ["started", "prepared" if holds else "taken back"]
    asked.guards.states[0].guards.check_memory = lambda: False
    assert asked.store.run_ahead(call) is None


def test_few_signatures_are_remembered(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_calls, "REMEMBERED", 2)
    asked.several(*"abc")
    assert [asked.store.may_serve(Fake(name)) for name in "abc"] == [False, True, True]
    with asked.store.paused():
        assert not asked.store.may_serve(Fake("c"))
    assert asked.store.may_serve(Fake("c"))


def test_prompts_are_counted_apart() -> None:
    whole = DecodingStatistics(captured=1)
    prompts = PromptStatistics(whole)
    prompts.captured += 2
    prompts.replayed += 3
    prompts.fused += 4
    prompts.capture_seconds += 5.0
    assert (whole.prompts_captured, whole.prompts_replayed, whole.prompts_fused) == (2, 3, 4)
    assert (whole.captured, whole.replayed, whole.capture_seconds) == (1, 0, 5.0)


def test_a_reason_is_new_once() -> None:
    statistics = Statistics()
    assert [statistics.add_reason(reason) for reason in ("one", "one", "two")] == [True, False, True]
    assert statistics.reasons == ("one", "two")


def test_a_call_may_take_the_memory_of_a_graph(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    asked.several(*"aa")
    monkeypatch.setattr(Fake, "is_served_by", lambda _call, graph: graph.addresses == 0)
    assert asked(Fake("a", 1)) == "replayed"
    assert asked(Fake("b", 1)) == "eager"
