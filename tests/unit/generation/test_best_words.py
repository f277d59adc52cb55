"""Texts with a head in two stages: tokens, and random numbers used, are those of the whole head."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from packaging.version import Version

import gemma4_compat
from gemma4_compat._generation.sampling import best_words
from gemma4_compat._graphs import fused_steps
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
    monkeypatch.setattr(fused_steps.Progress, "after", 2)
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
SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 4, "top_p": 0.95, "temperature": 1.7}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "a batch": {**SAMPLED, "batch": 3},
    "hidden words": {**GREEDY, "suppress_tokens": [3, 5, 500], "eos_token_id": [11, 12]},
}


@pytest.mark.parametrize("way", WAYS)
def test_texts_are_those_of_the_whole_head(made: Model, way: str) -> None:
    model = made()
    found = texts(model, **WAYS[way])
    counted = gemma4_compat.statistics(model).decoding
    assert (counted.heads_in_two_stages, counted.whole_heads, counted.not_fused) == (1, {}, ()), counted
    assert counted.fused
    rows = WAYS[way].get("batch", 1)
    assert counted.head_tokens >= (NEW - 1) * rows
    assert counted.head_words < counted.head_tokens * WORDS // 2
    expected = texts(made(whole=True), **WAYS[way])
    assert found == expected


def test_float16(made: Model) -> None:
    assert texts(made(dtype=torch.float16), **SAMPLED) == texts(made(whole=True, dtype=torch.float16), **SAMPLED)
