"""A head in host memory that a GPU reads in place: it has the tokens and the bits of a head on the card."""

from __future__ import annotations

import gc
import types
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers

import gemma4_compat
from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat._graphs import fused_steps
from gemma4_compat._lab import tiny_configs
from gemma4_compat._offload import host_memory
from gemma4_compat._offload.transfer import row_lookup
from tests.unit.generation import calls
from tests.unit.generation.test_best_words import GREEDY, SAMPLED, pytestmark
from tests.unit.generation.test_heads_on_host import NOT_HERE, dispatched
from tests.world.gpu.test_row_lookup import refuse

WORDS, WIDTH = 1 << 16, 1024
WAYS: dict[str, dict[str, Any]] = {"greedy": GREEDY, "sampled": {**SAMPLED, "top_k": 64}}
__all__ = ["pytestmark"]


@pytest.fixture(scope="module")
def weights() -> Any:
    """A model with a head of 128 MiB, on the CPU."""
    config = tiny_configs.config(6, width=WIDTH, per_layer_vocabulary=WORDS).text_config
    config.vocab_size, config.hidden_size_per_layer_input = WORDS, 32
    torch.manual_seed(0)
    model = transformers.Gemma4ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    model.generation_config.eos_token_id = None
    return model.to(torch.bfloat16).eval().state_dict(), config


def made(weights: Any, where: str) -> Any:
    """Such a model, its head on the "host" or on the "card"."""
    state, config = weights
    model = transformers.Gemma4ForCausalLM(config).to(torch.bfloat16).eval()
    model.load_state_dict(state)
    model.generation_config.eos_token_id = None
    model = dispatched(model, main="cuda:0") if where == "host" else model.cuda()
    return gemma4_compat.decode_fast(model)


def answers(model: Any, **options: Any) -> list[Any]:
    """Texts long enough for fused kernels, and the random numbers that were used."""
    torch.manual_seed(0)
    asked = {"min_new_tokens": 24, "max_new_tokens": 24, **options}
    found = [model.generate(**calls.text(model, seed=number), **asked).tolist() for number in range(3)]
    return [*found, torch.cuda.get_rng_state().tolist()]


@pytest.mark.parametrize("way", WAYS)
def test_tokens_and_memory(weights: Any, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(fused_steps.Progress, "early", 4)
    monkeypatch.setattr(fused_steps.Progress, "after", 4)
    found, peaks = {}, {}
    for where in ("card", "host", "host", "card"):  # kernels of the first are compiled, and tried
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        model = made(weights, where)
        torch.cuda.reset_peak_memory_stats()
        found[where] = answers(model, **WAYS[way])
        torch.cuda.synchronize()
        peaks[where] = torch.cuda.max_memory_allocated() - before
        counted = gemma4_compat.statistics(model).decoding
        assert (counted.heads_in_two_stages, counted.whole_heads, counted.reasons) == (3, {}, ())
        assert (bool(counted.fused), counted.not_fused) == (True, ())
        assert 0 < counted.head_words < counted.head_tokens * WORDS // 4
        del model
    assert found["host"] == found["card"]
    size = WORDS * WIDTH * 2
    assert peaks["card"] - peaks["host"] >= 0.95 * size


@pytest.mark.parametrize("rows", [1, 2, row_lookup.MOST_ROWS, row_lookup.MOST_ROWS + 1, 64])
def test_logits_have_the_bits_of_a_weight_on_the_card(weights: Any, rows: int) -> None:
    """The kernel of cuBLAS is the same. More rows read a copy, which goes."""
    models = {where: made(weights, where) for where in ("card", "host")}
    inputs = calls.text(models["card"], 96)
    with torch.no_grad():
        expected = models["card"](**inputs, logits_to_keep=rows).logits
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        found = models["host"](**inputs, logits_to_keep=rows).logits
    torch.cuda.synchronize()
    assert found.shape == (1, rows, WORDS)
    assert torch.equal(found, expected)
    is_copied = torch.cuda.max_memory_allocated() - before >= WORDS * WIDTH * 2
    assert is_copied == (rows > row_lookup.MOST_ROWS)


def other(weight: Any) -> Any:
    """With a word for each text that its last token makes likelier than itself. (A head that is tied to an embedding
    repeats a token, however the rows of both are permuted.)
    """
    found = weight.clone()
    for number in range(3):
        (last,) = calls.text(types.SimpleNamespace(device="cpu"), seed=number)["input_ids"][0, -1:].tolist()
        found[1000 + number] = 4 * weight[last]
    return found


@pytest.mark.parametrize("write", ["in place", "another tensor"])
def test_what_is_written_to_the_head_is_read(weights: Any, write: str) -> None:
    model = made(weights, "host")
    first = answers(model, **GREEDY)
    hook = module_hooks.offload_hook(model.lm_head)
    where = host_memory.stored(hook.weights_map, "weight")
    if write == "in place":
        torch.cuda.synchronize()
        where.raw.copy_(other(where.raw))
    else:
        model.load_state_dict(
            {f"{name}.weight": other(where.raw) for name in ("lm_head", "model.embed_tokens")}, False
        )
    found, plain = answers(model, **GREEDY), made(weights, "card")
    with torch.no_grad():
        plain.lm_head.weight.copy_(other(plain.lm_head.weight))
    assert found == answers(plain, **GREEDY)
    assert found != first


def test_memory_that_cannot_be_pinned_is_copied_as_before(weights: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answers(made(weights, "card"), **GREEDY)
    refuse(monkeypatch)
    host_memory._warn_once.cache_clear()
    model = made(weights, "host")
    with pytest.warns(gemma4_compat.Gemma4CompatWarning, match="cannot be pinned"):
        found = answers(model, **GREEDY)
    host_memory._warn_once.cache_clear()
    assert found == expected
    counted = gemma4_compat.statistics(model).decoding
    assert counted.whole_heads == {NOT_HERE: 3}
    assert (counted.replayed, bool(counted.reasons)) == (0, True)
