"""A user's streamer: steps follow from the last one as without it, and whatever it changes is noticed at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")
from transformers.generation import utils

from gemma4_compat._graphs import deferred_stop
from tests.unit.generation.calls import Models, layers, static_cache, text
from tests.unit.generation.test_step_inputs import Follows
from tests.unit.generation.test_step_inputs import follows as follows  # a fixture

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    not hasattr(utils, "DeferredStopCheck"), reason="transformers before 5.17 builds the inputs of every token"
)

NEW, AT = 16, 8


class Streamer:
    """Calls a function once, after some tokens."""

    def __init__(self, change: Callable[[], Any] = lambda: None) -> None:
        self.tokens: list[int] = []
        self._change = change

    def put(self, value: Any) -> None:
        self.tokens += value.flatten().tolist()
        if len(self.tokens) == 24 + AT:  # the prompt comes first
            self._change()

    def end(self) -> None:
        pass


def answer(model: Any, streamer: Any, **options: Any) -> tuple[list[int], Any]:
    """The tokens of a call, and the next random number."""
    torch.manual_seed(5)
    options = {"do_sample": False, "cache_implementation": "static", "max_new_tokens": NEW, **options}
    found = model.generate(**text(model), min_new_tokens=NEW, streamer=streamer, **options)
    return found[0].tolist(), torch.rand(1).item()


@pytest.fixture
def waits(tapes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token is read before the next step, so that a change counts from the same token on in both ways."""
    monkeypatch.setattr(deferred_stop, "WAITING", 0.0)


def test_steps_follow_from_each_other(models: Models, follows: Follows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_stop, "WAITING", float("inf"))
    model = models()
    streamer = Streamer()
    found = answer(model, streamer)
    assert found == answer(model, None, disable_compile=True)
    assert streamer.tokens == found[0]
    assert follows.steps > NEW // 2


def weight(model: Any) -> None:
    """Another weight at another address; the old one is still there. One in 4 bits may be packed for this CPU."""
    found = layers(model)[0].post_feedforward_layernorm
    model.kept = found.weight
    found.weight = torch.nn.Parameter(found.weight.detach() * 3, requires_grad=False)


def in_place(model: Any) -> None:
    layers(model)[0].mlp.down_proj.weight.data.mul_(3)


def hook(model: Any) -> None:
    layers(model)[1].mlp.register_forward_hook(lambda _module, _given, found: found.flip(-1))


def inputs(model: Any) -> None:
    """A method of the model's own that builds inputs."""
    below = model.prepare_inputs_for_generation

    def built(ids: Any, **given: Any) -> Any:
        found = below(ids, **given)
        return found | {"input_ids": torch.full_like(found["input_ids"], 7)}

    model.prepare_inputs_for_generation = built


def mode(model: Any) -> None:
    layers(model)[0].mlp.train()


def kept(model: Any) -> None:
    """A method that keeps the arguments of the next token."""
    below = model._update_model_kwargs_for_generation

    def updated(outputs: Any, kwargs: Any, **options: Any) -> Any:
        outputs.logits[:, :, 9] = 1e4  # what is sampled next
        return below(outputs, kwargs, **options)

    model._update_model_kwargs_for_generation = updated


@pytest.mark.parametrize("change", [weight, in_place, hook, inputs, mode, kept])
@pytest.mark.usefixtures("waits")
def test_what_it_changes_counts_from_the_next_token_on(models: Models, follows: Follows, change: Any) -> None:
    unchanged = answer(models.fresh(), Streamer())
    followed = follows.steps
    assert followed
    one, other = models.fresh(), models.fresh()
    found = answer(one, Streamer(lambda: change(one)))
    assert follows.steps > followed
    expected = answer(other, Streamer(lambda: change(other)), disable_compile=True)
    assert found == expected
    assert change is mode or found != unchanged, "else the test shows nothing"


@pytest.mark.usefixtures("waits")
def test_a_cache_that_it_changes(models: Models, follows: Follows) -> None:
    model = models()

    def said(**way: Any) -> Any:
        cache = static_cache(model)
        streamer = Streamer(lambda: [layer.reset() for layer in cache.layers if layer.is_initialized])
        options = {"cache_implementation": None, "past_key_values": cache, **way}
        return answer(model, streamer, **options)

    found = said()
    assert follows.steps
    assert found == said(disable_compile=True)


@pytest.mark.usefixtures("waits")
def test_a_processor_that_it_changes(models: Models, follows: Follows) -> None:
    from transformers import LogitsProcessorList, TopKLogitsWarper

    model = models()

    def said(**way: Any) -> Any:
        processor = TopKLogitsWarper(50)
        options = {"do_sample": True, "top_k": 0, "logits_processor": LogitsProcessorList([processor]), **way}
        return answer(model, Streamer(lambda: vars(processor).update(top_k=1)), **options)

    found = said()
    assert follows.steps
    assert found == said(disable_compile=True)
