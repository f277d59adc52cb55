"""Texts with a head in two stages: tokens, and random numbers used, are those of the whole head."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from packaging.version import Version
from transformers.generation import logits_process

import gemma4_compat
from gemma4_compat._generation.sampling import best_words
from gemma4_compat._graphs import decoder, fused_steps
from gemma4_compat._kernels.specs import head
from gemma4_compat._lab import tiny_configs
from tests.unit.generation import calls

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.17"), reason="transformers-deferred-stop says which words matter"
)
WORDS, NEW = 600, 5
Model = Callable[..., Any]


@pytest.fixture(scope="module")
def plain() -> Any:
    """A model with more words than the other tiny ones, before ``decode_fast``."""
    config = tiny_configs.config(6, width=128, per_layer_vocabulary=WORDS).text_config
    config.vocab_size = WORDS
    torch.manual_seed(0)
    model = transformers.Gemma4ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.1)
    model.generation_config.eos_token_id = None
    return model.to(torch.bfloat16).eval()


@pytest.fixture
def made(plain: Any, kernels_on_host: None, monkeypatch: pytest.MonkeyPatch) -> Model:
    """A function that returns such a model after ``decode_fast``; ``whole`` computes all words."""
    monkeypatch.setattr(head, "LEAST", 0)
    monkeypatch.setattr(head, "FEWEST", 8)
    monkeypatch.setattr(fused_steps.Progress, "after", 10**6)
    of = best_words.of

    def make(*, whole: bool = False, dtype: Any = torch.bfloat16, **options: Any) -> Any:
        monkeypatch.setattr(best_words, "of", (lambda *_: None) if whole else of)
        return gemma4_compat.decode_fast(copy.deepcopy(plain).to(dtype), **options)

    return make


def texts(model: Any, count: int = 1, batch: int = 1, **options: Any) -> list[Any]:
    """The tokens of some calls, and the state of the random numbers after them."""
    found: list[Any] = []
    torch.manual_seed(0)
    for number in range(count):
        prompt = calls.text(model, batch=batch, seed=number)
        asked = {"max_new_tokens": NEW, "min_new_tokens": NEW, **options}
        found.append(model.generate(**prompt, **asked).tolist())
    return [*found, torch.get_rng_state().tolist()]


GREEDY: dict[str, Any] = {"do_sample": False}
SHORT: dict[str, Any] = {**GREEDY, "max_new_tokens": 3, "min_new_tokens": 3}
SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 4, "top_p": 0.95, "temperature": 1.7}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "a batch": {**SAMPLED, "batch": 2},
    "many texts": {**SAMPLED, "batch": 9},
    "hidden words": {**GREEDY, "suppress_tokens": [3, 5, 500], "eos_token_id": [11, 12]},
}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.full if way == "many texts" else ()) for way in WAYS]
)
def test_texts_are_those_of_the_whole_head(made: Model, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    if way == "greedy":
        monkeypatch.setattr(fused_steps.Progress, "after", 2)
    model = made()
    found = texts(model, **WAYS[way])
    counted = gemma4_compat.statistics(model).decoding
    assert (counted.heads_in_two_stages, counted.whole_heads, counted.not_fused) == (1, {}, ()), counted
    assert bool(counted.fused) == (way == "greedy")
    rows = WAYS[way].get("batch", 1)
    assert counted.head_tokens >= (NEW - 1) * rows
    assert counted.head_words < counted.head_tokens * WORDS // 2
    expected = texts(made(whole=True), **WAYS[way])
    assert found == expected


def test_float16(made: Model) -> None:
    assert texts(made(dtype=torch.float16), **SAMPLED) == texts(made(whole=True, dtype=torch.float16), **SAMPLED)


def _through_data(weight: Any) -> None:
    weight.data.copy_(weight.data.flip(0))


def _through_its_storage(weight: Any) -> None:
    memory = torch.empty(0, dtype=weight.dtype).set_(weight.untyped_storage())
    memory.copy_(memory.flip(0))


def _through_numpy(weight: Any) -> None:
    numbers = weight.data.view(torch.int16).numpy()
    numbers[:] = numbers[::-1].copy()


def test_a_head_that_was_written_to_is_copied_anew(made: Model) -> None:
    """Whoever did it, and however: no counter of versions, nor an address, tells of some of these."""
    model = made()
    two_stages = best_words.of
    whole, found = made(whole=True), []
    for change in (None, _through_data, _through_its_storage, _through_numpy):
        answers = []
        for one in (model, whole):
            if change is not None:
                change(one.lm_head.weight)
            with pytest.MonkeyPatch.context() as patch:
                if one is model:
                    patch.setattr(best_words, "of", two_stages)
                answers.append(texts(one, **SHORT))
        assert answers[0] == answers[1], change
        found.append(answers[0])
    assert found[0] != found[1]
    assert gemma4_compat.statistics(model).decoding.heads_in_two_stages == 4


class Streamer:
    """Somebody's code between two tokens."""

    def put(self, value: Any) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""


#: Calls that need the whole head, and why.
WHOLE: dict[str, dict[str, Any]] = {
    "all logits are asked for": {"return_dict_in_generate": True, "output_logits": True},
    "code of the user's runs between two tokens": {"streamer": Streamer()},
    "tokens are sampled without top-k": {**SAMPLED, "top_k": 0},
    "a logits processor: RepetitionPenaltyLogitsProcessor": {"repetition_penalty": 1.3},
}


def test_the_statistics_say_why_the_whole_head_is_computed(made: Model) -> None:
    model = made()
    for options in WHOLE.values():
        model.generate(**calls.text(model), **{**GREEDY, "max_new_tokens": 2, "min_new_tokens": 2, **options})
    counted = gemma4_compat.statistics(model).decoding
    assert counted.whole_heads == dict.fromkeys(WHOLE, 1)
    assert (counted.heads_in_two_stages, decoder.of(model).head) == (0, None)


def test_where_memory_is_short_the_copy_goes(made: Model) -> None:
    model = made()
    expected = texts(model, **SHORT)
    decoding = decoder.of(model)
    assert decoding.give_back_head()
    assert not any(decoding.steps.graphs())
    assert texts(model, **SHORT) == expected
    counted = gemma4_compat.statistics(model).decoding
    assert (counted.heads_in_two_stages, counted.whole_heads) == (1, {"memory is short": 1})
    gemma4_compat.decode_fast(gemma4_compat.decode_fast(model, enabled=False))
    assert texts(model, **SHORT) == expected
    assert decoding.head is not None


def listed(*processors: Any, **config: Any) -> int | str:
    asked = {"do_sample": True, "return_dict_in_generate": False, "output_logits": False, "output_scores": False}
    return best_words.most(processors, types.SimpleNamespace(**{**asked, **config}))


def test_how_many_words_matter() -> None:
    ends = torch.tensor([1, 106])
    temperature, top_k = logits_process.TemperatureLogitsWarper(0.7), logits_process.TopKLogitsWarper(64)
    least = logits_process.MinLengthLogitsProcessor(5, ends)
    hidden = logits_process.SuppressTokensLogitsProcessor([3, 4, 5])
    assert listed(do_sample=False) == 1
    assert listed(least, hidden, do_sample=False) == 1 + 2 + 3
    assert listed(temperature, top_k) == 64
    assert listed(hidden, temperature, top_k, logits_process.TypicalLogitsWarper(0.5)) == 64 + 3
    assert listed(temperature) == "tokens are sampled without top-k"
    assert (
        listed(logits_process.TemperatureLogitsWarper(1e-30), top_k) == "a logits processor: TemperatureLogitsWarper"
    )
    assert isinstance(listed(logits_process.TopKLogitsWarper(5, filter_value=-1e4)), str)
    own = type("TopKLogitsWarper", (logits_process.TopKLogitsWarper,), {})(5)
    assert isinstance(listed(own), str)
    assert isinstance(listed(logits_process.InfNanRemoveLogitsProcessor(), top_k), str)
    for name in ("output_logits", "output_scores"):
        assert listed(top_k, **{name: True}) == 64
        assert listed(top_k, return_dict_in_generate=True, **{name: True}) == "all logits are asked for"


def test_who_else_sees_logits(plain: Any) -> None:
    model = copy.deepcopy(plain)
    assert best_words._seen_by_others(model, model.lm_head) is None
    for module in (model, model.lm_head):
        hook = module.register_forward_hook(lambda *_: None)
        assert best_words._seen_by_others(model, model.lm_head) == "a hook sees logits"
        hook.remove()
    every = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert best_words._seen_by_others(model, model.lm_head) == "a hook sees logits"
    every.remove()
    hooks = pytest.importorskip("accelerate.hooks")
    hooks.add_hook_to_module(model, hooks.ModelHook())
    assert best_words._seen_by_others(model, model.lm_head) is None
    hooked = model.forward
    model.forward = lambda *args, **kwargs: hooked(*args, **kwargs)  # after dispatch, and before
    assert best_words._seen_by_others(model, model.lm_head) == "a forward was replaced"
    hooks.remove_hook_from_module(model)
    model.forward = functools.partial(type(model).forward, model)
    hooks.add_hook_to_module(model, hooks.ModelHook())
    assert best_words._seen_by_others(model, model.lm_head) == "a forward was replaced"
    hooks.remove_hook_from_module(model)
    del model.forward
    model.lm_head.forward = model.lm_head.forward
    assert best_words._seen_by_others(model, model.lm_head) == "a forward was replaced"
    adapted = torch.nn.Sequential(model.lm_head)
    assert best_words._seen_by_others(plain, adapted) == "the head is not a plain linear layer"
