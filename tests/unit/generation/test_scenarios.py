"""Ways to ask for an answer: each is that of the same call with ``disable_compile=True``, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("bitsandbytes")

from gemma4_compat._gemma4.models import variants
from gemma4_compat._lab import tiny, tiny_models
from tests.unit.generation.calls import (
    SCENARIOS,
    WINDOW,
    Models,
    ask,
    compared,
    generate,
    static_cache,
    steps,
    text,
    whole,
)

pytestmark = pytest.mark.usefixtures("tapes")
EAGER = {"disable_compile": True}


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize(
    ("quantization", "where"), [("4bit-double", "device"), pytest.param(None, "streamed", marks=pytest.mark.full)]
)
def test_the_same_answers(models: Models, quantization: str | None, where: str, scenario: str) -> None:
    model = models(quantization, "language", where)
    compared(model, SCENARIOS[scenario](model, models))
    assert steps(model).reasons == ()


@pytest.mark.parametrize("length", [1, WINDOW - 2, WINDOW - 1, WINDOW])
def test_the_window_fills(models: Models, length: int) -> None:
    model = models()
    compared(model, lambda way: [generate(model, text(model, length), way, new=6)])


@pytest.mark.parametrize("chunk", [5, 24])
def test_a_prompt_in_chunks(models: Models, chunk: int) -> None:
    model = models()
    compared(model, ask(model, prefill_chunk_size=chunk))


def test_a_streamer_gets_every_token(models: Models) -> None:
    from transformers.generation.streamers import BaseStreamer

    class Keeps(BaseStreamer):
        def __init__(self) -> None:
            self.got: list[int] = []

        def put(self, value: Any) -> None:
            self.got += value.flatten().tolist()

        def end(self) -> None:
            self.got.append(-1)

    model, streamer = models(), Keeps()
    found = generate(model, text(model), streamer=streamer)
    assert streamer.got == [*found.sequences[0].tolist(), -1]


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}])
def test_everything_that_can_be_asked_for_is_returned(models: Models, options: dict[str, Any]) -> None:
    import torch

    model = models.fresh()
    model.set_attn_implementation("eager")
    asked = {"output_scores": True, "output_hidden_states": True, "output_attentions": True, **options}
    (found,) = compared(model, ask(model, **asked))
    expected = generate(model, text(model), EAGER, **asked)
    assert steps(model).reasons == ()
    assert vars(found).keys() == vars(expected).keys() >= {"scores", "logits", "hidden_states", "attentions"}
    for name, value in vars(found).items():
        pairs = list(zip(leaves(value), leaves(vars(expected)[name]), strict=True))
        assert pairs
        assert all(one.shape == other.shape and torch.equal(one, other) for one, other in pairs), name


def leaves(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [leaf for part in value for leaf in leaves(part)]
    return [value]


def test_the_cache_that_a_call_returns(models: Models) -> None:
    """Its lengths, too: the next call goes on from them."""
    import torch

    model = models()
    given = [static_cache(model), static_cache(model)]
    caches = [
        whole(model, text(model, 5), way, past_key_values=cache).past_key_values
        for way, cache in zip(({}, EAGER), given, strict=True)
    ]
    assert caches[0] is given[0]
    for one, other in zip(*(cache.layers for cache in caches), strict=True):
        assert vars(one).keys() == vars(other).keys()
        for name, value in vars(one).items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, vars(other)[name]), name
            else:
                assert value == vars(other)[name], name


def test_beams_leave_nothing_of_ours_on_a_cache(models: Models) -> None:
    model, cache = models(), static_cache(models())
    names = [set(vars(layer)) for layer in cache.layers]
    generate(model, text(model, 5), num_beams=2, past_key_values=cache)
    left = [set(vars(layer)) - before for before, layer in zip(names, cache.layers, strict=True)]
    assert not {"reorder_cache", "update", "lazy_initialization"} & set().union(*left)


@pytest.mark.parametrize("options", [{"do_sample": True}, {"length_penalty": 2.0}, {"early_stopping": True}])
def test_beams(models: Models, options: dict[str, Any]) -> None:
    model = models()
    for batch in (1, 2):
        given = text(model, batch=batch)
        compared(model, lambda way, given=given: [generate(model, given, way, num_beams=3, **options)])


def test_inference_mode_and_back(models: Models) -> None:
    import torch

    model = models.fresh()
    for _ in range(2):
        with torch.inference_mode():
            compared(model, ask(model))
        vars(model).pop("_cache", None)  # which transformers keeps (before 5.15), and cannot reset outside
        compared(model, ask(model))
    assert steps(model).reasons == ()


def test_rows_that_end_before_others(models: Models) -> None:
    model = models()
    (free,) = compared(model, lambda way: [generate(model, text(model, batch=2), way, new=8)])
    end = int(free.sequences[0, -6])
    options = {"min_new_tokens": 1, "eos_token_id": end, "pad_token_id": 0}
    compared(model, lambda way: [generate(model, text(model, batch=2), way, new=8, **options)])


@pytest.mark.parametrize("quantization", [None, "4bit-double"])
def test_the_text_only_class(models: Models, quantization: str | None) -> None:
    checkpoint = models.workspace.cached(models.workspace._text_copy)
    model = tiny.load(checkpoint, quantization, cls=tiny_models.class_name(checkpoint, text_only=True))
    compared(model, ask(model))
    compared(model, ask(model, num_beams=2))
    assert steps(model).reasons == ()


@pytest.mark.full
@pytest.mark.parametrize(
    ("variant", "quantization"), [*((name, None) for name in variants.NAMES), ("26B-A4B", "4bit"), ("31B", "4bit")]
)
def test_every_variant(models: Models, variant: str, quantization: str | None) -> None:
    import transformers

    if variant == variants.UNIFIED and not hasattr(transformers, "Gemma4UnifiedConfig"):
        pytest.skip("this transformers has no gemma4_unified")
    checkpoint = models.workspace.cached(tiny_models.build_checkpoint, variant=variant)
    model = tiny.load(checkpoint, quantization)
    compared(model, lambda way: [generate(model, text(model, 5, batch=2), way, new=WINDOW)])
    assert steps(model).reasons == ()
