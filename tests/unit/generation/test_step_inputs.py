"""Inputs that are made from those of the last token: each answer is that of the same call with ``disable_compile``."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")
from transformers.generation import utils

from gemma4_compat._gemma4.cache import cache_names
from gemma4_compat._generation import call
from gemma4_compat._graphs import decoder, fused_steps, static_caches, step_inputs
from gemma4_compat._kernels import kernels
from tests.unit.generation.calls import (
    WINDOW,
    Models,
    assert_equal,
    compared,
    generate,
    layers,
    static_cache,
    steps,
    text,
    whole,
)
from tests.unit.kernels.host_kernels import HostCompiler

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    not hasattr(utils, "DeferredStopCheck"), reason="transformers before 5.17 builds the inputs of every token"
)

NEW = 24


class Follows:
    """Steps that followed from the last one, and comparisons: whether each was equal."""

    def __init__(self) -> None:
        self.steps = 0
        self.equal: list[bool] = []


@pytest.fixture
def follows(tapes: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Follows]:
    found = Follows()
    follow, compare = call.Decoder.follow, step_inputs.Following.compare

    def followed(self: Any, ids: Any) -> Any:
        found.steps += 1
        return follow(self, ids)

    def was_compared(self: Any, graph: Any, step: Any) -> None:
        known = self.last is not None and self.last.graph is graph
        compare(self, graph, step)
        if known:
            found.equal.append(self._compared)

    monkeypatch.setattr(call.Decoder, "follow", followed)
    monkeypatch.setattr(step_inputs.Following, "compare", was_compared)
    return found


def padded(model: Any, *, left: bool, length: int = 5) -> dict[str, Any]:
    """Three sequences of different lengths."""
    batch = text(model, length, batch=3)
    batch["attention_mask"].fill_(1)
    for row, pads in enumerate((0, 1, length - 2)):
        if pads:
            where = slice(0, pads) if left else slice(length - pads, length)
            batch["input_ids"][row, where], batch["attention_mask"][row, where] = 0, 0
    return batch


def asked(model: Any, batch: dict[str, Any], **options: Any) -> Any:
    return compared(model, lambda way: [generate(model, batch, way, new=NEW, **options)])


@pytest.mark.parametrize("length", [1, WINDOW - 3, WINDOW - 1, WINDOW, 3 * WINDOW])
def test_most_steps_follow_whenever_the_window_fills(models: Models, follows: Follows, length: int) -> None:
    model = models()
    asked(model, text(model, length))
    follows.steps = 0
    asked(model, text(model, length))  # every graph is there
    before, after = max(WINDOW - length, 0), NEW - 1 - max(WINDOW - length, 0)
    expected = sum(max(kind - 2, 0) for kind in (before, after))
    assert follows.steps == expected > NEW // 2
    assert all(follows.equal)


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("length", [5, 3 * WINDOW])
def test_sequences_of_different_lengths(models: Models, follows: Follows, left: bool, length: int) -> None:
    """Padding moves out of the sliding windows, token by token."""
    model = models()
    asked(model, padded(model, left=left, length=length))
    assert follows.steps > 0
    assert all(follows.equal)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {"do_sample": True, "num_return_sequences": 3},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"output_scores": True},
    ],
)
def test_processors_of_transformers(models: Models, follows: Follows, options: dict[str, Any]) -> None:
    model = models()
    (found,) = asked(model, text(model, 5, batch=2), **options)
    assert follows.steps > NEW // 2
    if "output_scores" in options:
        assert len({score.data_ptr() for score in (*found.scores, *found.logits)}) == 2 * NEW


def test_images_and_sounds(models: Models, follows: Follows) -> None:
    model = models()
    asked(model, models.workspace.inputs())
    assert follows.steps > NEW // 2


@pytest.mark.parametrize("quantization", [None, "4bit-double"])
@pytest.mark.parametrize("where", ["host", "streamed"])
def test_wherever_weights_are(models: Models, follows: Follows, quantization: str | None, where: str) -> None:
    model = models(quantization, "language", where)
    asked(model, padded(model, left=True))
    assert follows.steps > NEW // 2


def test_embeddings_instead_of_tokens(models: Models, follows: Follows) -> None:
    model = models()
    batch = text(model, 5)
    batch["inputs_embeds"] = model.get_input_embeddings()(batch.pop("input_ids"))
    asked(model, batch)
    assert follows.steps > NEW // 2


def test_inference_mode_and_adapters(models: Models, follows: Follows) -> None:
    model = models.fresh("4bit", "language")
    with torch.inference_mode():
        asked(model, padded(model, left=True))
    vars(model).pop("_cache", None)
    for _ in range(2):
        (first,) = asked(model, padded(model, left=True))
        with model.disable_adapter():
            (second,) = asked(model, padded(model, left=True))
        assert not torch.equal(first.logits[-1], second.logits[-1])
    assert follows.steps > 5 * NEW // 2
    assert all(follows.equal)


@pytest.mark.parametrize("own", [False, True])
def test_a_step_that_is_fused_meanwhile(
    models: Models, follows: Follows, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    if (reason := HostCompiler.unsupported_reason()) is not None:
        pytest.skip(reason)
    monkeypatch.setitem(kernels.COMPILERS, "cpu", HostCompiler)
    monkeypatch.setattr(fused_steps.Progress, "after", 8)
    model = models.fresh(own=own)
    batch = padded(model, left=True, length=3 * WINDOW)
    found = generate(model, batch, new=NEW)
    assert steps(model).fused == 1
    assert follows.steps > NEW // 2
    monkeypatch.setattr(step_inputs, "serves", lambda _model: False)
    counted = follows.steps
    assert_equal(found, generate(models.fresh(own=own), batch, new=NEW))
    assert follows.steps == counted


def test_turns_on_one_cache(models: Models, follows: Follows) -> None:
    model = models()

    def run(way: dict[str, Any]) -> list[Any]:
        cache, found = static_cache(model, 128), []
        ids = text(model, 5)["input_ids"]
        for turn in range(3):
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            found.append(generate(model, batch, way, new=9, past_key_values=cache))
            ids = torch.cat([found[-1].sequences, text(model, 4, seed=turn)["input_ids"]], dim=-1)
        return found

    compared(model, run)
    assert follows.steps > 0
    assert all(follows.equal)


def test_what_is_returned_is_the_callers(models: Models, follows: Follows) -> None:
    """Hidden states of a token are not overwritten by those of the next; the cache has counted every token."""
    model = models()
    options = {"new": NEW, "output_hidden_states": True}
    found, expected = (whole(model, text(model, 5), way, **options) for way in ({}, {"disable_compile": True}))
    assert follows.steps > NEW // 2
    for one, other in zip(found.hidden_states, expected.hidden_states, strict=True):
        assert all(map(torch.equal, one, other))
    caches = [cache_names.cache_in(one) for one in (found, expected)]
    assert all(map(torch.equal, *map(static_caches.tensors, caches)))
    counted = [[layer.cumulative_length_int for layer in static_caches.sliding(cache)] for cache in caches]
    assert counted[0] == counted[1]


def test_another_graph_writes_where_the_output_was(
    models: Models, follows: Follows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread replays its graph, which shares memory with this one, before ``generate`` reads the logits."""
    follow = call.Decoder.follow

    def followed(self: Any, ids: Any) -> Any:
        found = follow(self, ids)
        self.following.last.graph.outputs.logits.fill_(float("nan"))
        return found

    monkeypatch.setattr(call.Decoder, "follow", followed)
    asked(models(), text(models(), 5))
    assert follows.steps > NEW // 2


def test_a_text_that_ends(models: Models, follows: Follows) -> None:
    model = models()
    (free,) = asked(model, text(model, 5, batch=2))
    options = {"min_new_tokens": 1, "eos_token_id": int(free.sequences[0, -6]), "pad_token_id": 0}
    asked(model, text(model, 5, batch=2), **options)


def test_inputs_that_would_differ_are_built(models: Models, follows: Follows, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong position, or a wrong mask, is noticed before it is used."""
    advance = step_inputs.Inputs.advance

    def wrong_position(self: Any, tokens: Any) -> None:
        advance(self, tokens)
        self._positions.add_(1)

    def wrong_mask(self: Any, tokens: Any) -> None:
        self._next += 1
        advance(self, tokens)
        self._next -= 1

    def forgotten_padding(self: Any, tokens: Any) -> None:
        advance(self, tokens)
        for mask in (*self._growing, *self._shifting):
            mask[1, ..., 0] = True

    model = models()
    for wrong in (wrong_position, wrong_mask, forgotten_padding):
        monkeypatch.setattr(step_inputs.Inputs, "advance", wrong)
        follows.equal.clear()
        asked(model, padded(model, left=True))
        assert follows.steps == 0
        assert not any(follows.equal)
        assert len(follows.equal) > NEW // 2


def test_a_step_that_no_graph_serves(models: Models, follows: Follows, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight is replaced, or a setting, as if by another thread, between two steps that follow."""
    model = models.fresh()
    follow, changes = call.Decoder.follow, {8, 14}

    def changed(self: Any, ids: Any) -> Any:
        if ids.shape[1] in changes:
            norm = layers(model)[1].input_layernorm
            norm.weight = torch.nn.Parameter(norm.weight.detach().clone(), requires_grad=False)
        return follow(self, ids)

    monkeypatch.setattr(call.Decoder, "follow", changed)
    asked(model, padded(model, left=True, length=3))
    assert steps(model).recaptures
    assert follows.steps > 0


def test_users_functions_are_asked_for_every_token(
    models: Models, follows: Follows, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LogitsProcessor

    class Processor(LogitsProcessor):
        def __call__(self, ids: Any, scores: Any) -> Any:
            return scores

    model = models.fresh()
    asked(model, text(model), logits_processor=[Processor()])
    assert follows.steps == 0
    asked(model, text(model), num_beams=2)
    assert follows.steps == 0
    prepare, prepared = model.prepare_inputs_for_generation, []

    def own(*args: Any, **kwargs: Any) -> Any:
        prepared.append(args)
        return prepare(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(model, "prepare_inputs_for_generation", own)
        generate(model, text(model), new=NEW)
    assert len(prepared) == NEW
    import functools

    kind = type(model)
    monkeypatch.setattr(
        kind,
        "_update_model_kwargs_for_generation",
        functools.wraps(kind._update_model_kwargs_for_generation)(
            lambda self, *args, **kwargs: super(kind, self)._update_model_kwargs_for_generation(*args, **kwargs)
        ),
    )
    assert not step_inputs.serves(model)


def test_the_eager_attention_has_other_masks(models: Models, follows: Follows) -> None:
    model = models.fresh()
    model.set_attn_implementation("eager")
    asked(model, padded(model, left=True))
    assert follows.steps == 0


def test_implementations_of_experts_are_switched_and_restored(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = models.fresh(), []
    configs = [module.config for module in model.modules() if hasattr(module, "get_correct_experts_implementation")]
    implementations = ("grouped_mm", "batched_mm")
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))

    def now() -> list[Any]:
        return [config._experts_implementation for config in configs]

    def switched(subject: Any) -> list[list[Any]]:
        model.set_experts_implementation(dict.fromkeys(model.get_experts_implementation(), "grouped_mm"))
        found = [now()]
        with subject._optimize_model_for_decode():
            found.append(now())
        return [*found, now()]

    expected = switched(model)
    assert [implementations[0] in found for found in expected] == [True, False, True]
    walked = type(model).modules
    monkeypatch.setattr(type(model), "modules", lambda self: calls.append(1) or walked(self))
    loop = step_inputs.Loop(model, call.Decoder)
    model.set_experts_implementation = lambda wanted: calls.append(wanted)  # the model's own comes first
    with loop._optimize_model_for_decode():
        assert len(calls) == 1
    del model.set_experts_implementation, calls[:]
    assert switched(loop) == expected
    assert calls == [1]  # our own call of `set_experts_implementation`


def test_submodels_are_found_once_until_modules_change(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    model, walks = models.fresh(), []
    walked = step_inputs.walk.modules
    own = SimpleNamespace(modules=lambda root: walks.append(root) or walked(root))  # others walk as well
    monkeypatch.setattr(step_inputs, "walk", own)
    decoding, cache = decoder.of(model), static_cache(model)

    def submodels() -> list[Any]:
        decoding._states.check(SimpleNamespace(model=model), first=True, no_user_code=False)
        return step_inputs._Submodels(model, call.Decoder(model, decoding, cache).state).modules()

    found = submodels()
    assert found
    assert all(one is other for one, other in zip(found, submodels(), strict=True))
    assert walks == [model]
    model.get_decoder().layers[0].mlp.act_fn = torch.nn.Identity()
    submodels()
    assert walks == [model, model]
