"""The replay of a prompt begins before the whole model was looked at, and leaves no trace if that has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("bitsandbytes")

import torch

import gemma4_compat
from gemma4_compat._engine import versions
from gemma4_compat._graphs.captured_calls import CapturedCalls
from gemma4_compat._graphs.guards.model import ModelGuards
from gemma4_compat._lab.stand_ins.tape import Tape
from tests.unit.generation.calls import (
    ATTRIBUTES,
    CHANGES,
    Models,
    assert_equal,
    generate,
    layers,
    reads_attributes,
    steps,
    text,
)

new_caches_each_time = pytest.mark.skipif(
    versions.admits("<5.15", versions.current("transformers") or "0"), reason="transformers keeps the cache itself"
)
pytestmark = [pytest.mark.usefixtures("tapes"), new_caches_each_time]
replay, look = Tape.replay, ModelGuards.check_all
EAGER = {"disable_compile": True}
SAMPLED = {"do_sample": True, "top_k": 20}


def read(models: Models, prepared: Callable[[Any], Any] = lambda _: None) -> Any:
    """A model whose prompt of five tokens is replayed."""
    model = models.fresh(None)
    prepared(model)
    gemma4_compat.decode_fast(model, exact=True)
    for seed in range(4):
        generate(model, text(model, 5, seed=seed), **SAMPLED)
    assert steps(model).prompts_replayed >= 2
    return model


def begun(model: Any, **options: Any) -> tuple[Any, int]:
    """The answer, and how many replays of prompts began before the model was looked at."""
    replays, ahead = 0, CapturedCalls.run_ahead

    def counted(store: Any, prompt: Any) -> Any:
        nonlocal replays
        known = [graph.recording for graph in store.graphs()]
        before = sum(recording.replays for recording in known)
        outputs = ahead(store, prompt)
        replays += sum(recording.replays for recording in known) - before
        return outputs

    with mock.patch.object(CapturedCalls, "run_ahead", counted):
        found = generate(model, text(model, 5, seed=9), **SAMPLED, **options)
    return found, replays


def test_a_replay_begins_before_the_look(models: Models) -> None:
    model, order = read(models), []
    with (
        mock.patch.object(Tape, "replay", lambda tape: order.append("replay") or replay(tape)),
        mock.patch.object(ModelGuards, "check_all", lambda known: order.append("look") or look(known)),
    ):
        assert_equal(
            generate(model, text(model, 5, seed=9), new=1), generate(model, text(model, 5, seed=9), EAGER, new=1)
        )
    assert order == ["replay", "look"]


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_noticed(models: Models, what: str) -> None:
    model = read(models)
    CHANGES[what](model)
    found, _ = begun(model)
    assert_equal(found, generate(model, text(model, 5, seed=9), EAGER, **SAMPLED))


@pytest.mark.parametrize("what", ATTRIBUTES)
def test_a_begun_replay_is_undone(models: Models, what: str) -> None:
    model = read(models, lambda model: reads_attributes(layers(model)[1].mlp))
    counted = steps(model).prompts_replayed
    ATTRIBUTES[what](layers(model)[1].mlp)
    found, replays = begun(model)
    assert replays == (what != "the data of a tensor")  # that memory may be somebody else's now
    assert steps(model).prompts_replayed == counted
    assert_equal(found, generate(model, text(model, 5, seed=9), EAGER, **SAMPLED))
    for seed in range(3):
        generate(model, text(model, 5, seed=seed), **SAMPLED)
    assert steps(model).prompts_replayed > counted


def test_undone_it_leaves_no_trace(models: Models) -> None:
    model, drawn, caches = read(models), [], []

    def replayed(tape: Any) -> None:
        replay(tape)
        drawn.append(torch.rand(3))

    def given(store: Any, prompt: Any) -> Any:
        before = [{name: str(value) for name, value in vars(layer).items()} for layer in prompt.cache.layers]
        assert ahead(store, prompt) is None
        after = [{name: str(value) for name, value in vars(layer).items()} for layer in prompt.cache.layers]
        caches.append((before, after))

    ahead = CapturedCalls.run_ahead
    with (
        mock.patch.object(Tape, "replay", replayed),
        mock.patch.object(ModelGuards, "check_all", return_value=False),
        mock.patch.object(CapturedCalls, "run_ahead", given),
    ):
        found = generate(model, text(model, 5, seed=9), **SAMPLED, new=1)
    ((before, after),) = caches
    assert [layer.keys() for layer in before] == [layer.keys() for layer in after]
    for one, other in zip(before, after, strict=True):
        assert one | {"lazy_initialization": None} == other | {"lazy_initialization": None}
    assert len(drawn) == 1
    assert_equal(found, generate(model, text(model, 5, seed=9), EAGER, **SAMPLED, new=1))
