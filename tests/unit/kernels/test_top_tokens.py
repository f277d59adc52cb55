"""Top-k and top-p by kernels: the bits of transformers' processors, and of those where a kernel does not serve."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from transformers.generation import logits_process

import gemma4_compat
from gemma4_compat._engine.io.bits import same_bits
from gemma4_compat._generation.sampling import fast_processors
from gemma4_compat._generation.speculative import speculative_steps
from gemma4_compat._graphs import fused_steps
from gemma4_compat._kernels import kernels
from gemma4_compat._kernels.match import top_tokens
from tests.unit.generation import calls
from tests.unit.generation.calls import Models
from tests.unit.kernels.host_kernels import HostCompiler

CPU = torch.device("cpu")
SAMPLED = {"do_sample": True, "top_k": 30, "top_p": 0.95, "max_new_tokens": 24, "eos_token_id": None}
VOCABULARY = 5 << 12
pytestmark = pytest.mark.skipif(
    HostCompiler.unsupported_reason() is not None, reason=str(HostCompiler.unsupported_reason())
)


_tried: dict[Any, kernels.Kernels] = {}


@pytest.fixture(autouse=True)
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's sort is stable on CUDA, but not on every CPU, and its softmax adds up in another order there."""
    monkeypatch.setitem(kernels.COMPILERS, "cpu", HostCompiler)
    monkeypatch.setattr(kernels, "_kernels", _tried)
    monkeypatch.setattr(torch, "sort", functools.partial(torch.sort, stable=True))
    monkeypatch.setattr(torch.Tensor, "softmax", softmax_of_cuda)


def softmax_of_cuda(scores: Any, dim: int) -> Any:
    """cunn_SoftMaxForward of rows whose length 4,096 divides, in float32; others as on the CPU."""
    if dim != -1 or scores.shape[-1] % 4096 or scores.dtype != torch.float32:
        return torch.softmax(scores, dim)
    powers = exponentials(scores - scores.amax(-1, keepdim=True))
    sums = torch.zeros((len(scores), 1024))
    for four in powers.view(len(scores), -1, 1024, 4).unbind(1):
        for one in four.unbind(-1):
            sums = sums + one
    for _ in ("lanes of warps", "warps"):
        sums = sums.view(len(scores), -1, 32)
        while sums.shape[-1] > 1:
            sums = sums[..., : sums.shape[-1] // 2] + sums[..., sums.shape[-1] // 2 :]
    return powers / sums.view(-1, 1)


_expf = ctypes.CDLL(ctypes.util.find_library("m")).expf
_expf.restype, _expf.argtypes = ctypes.c_float, [ctypes.c_float]


def exponentials(scores: Any) -> Any:
    """By the function that kernels call on the host; PyTorch's differs in the last bit."""
    values, places = scores.unique(return_inverse=True)
    return torch.tensor([_expf(value) for value in values.tolist()])[places]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each call that kernels have computed, apart from trials."""
    found = []
    launch = kernels.Kernels.launch

    def noted(self: kernels.Kernels, kernel: Any) -> None:
        if "::kept<" in kernel.text and kernel.sizes[0] != top_tokens._TRIED:
            found.append(kernel.blocks[0])
        launch(self, kernel)

    monkeypatch.setattr(kernels.Kernels, "launch", noted)
    return found


def processors(k: int = 64, p: float = 0.95, least: int = 1, **options: Any) -> list[Any]:
    return [
        logits_process.TopKLogitsWarper(k, min_tokens_to_keep=least, **options),
        logits_process.TopPLogitsWarper(p, min_tokens_to_keep=least, **options),
    ]


def drawn(rows: int = 3, dtype: Any = torch.bfloat16, vocabulary: int = VOCABULARY) -> Any:
    return torch.randn((rows, vocabulary), generator=torch.Generator().manual_seed(rows)).to(dtype).float()


def by_transformers(scores: Any, both: list[Any]) -> Any:
    for processor in both:
        scores = processor(None, scores)
    return scores


def compared(scores: Any, both: list[Any]) -> None:
    """Together, as rows of a batch, each row as in a call of its own, and the tokens that are drawn."""
    (called,) = fast_processors.paired(both)
    given, noise = scores.clone(), torch.empty_like(scores).exponential_(generator=torch.Generator().manual_seed(1))
    rows = [by_transformers(row, both) for row in scores.split(1)]
    tokens = [(row.softmax(-1) / own).argmax(-1) for row, own in zip(rows, noise.split(1), strict=True)]
    assert same_bits(called(None, scores), by_transformers(scores, both))
    assert same_bits(called.rows(scores), torch.cat(rows))
    assert called.drawn(scores, noise).tolist() == torch.cat(tokens).tolist()
    assert same_bits(scores, given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "given", [{}, {"k": 1}, {"k": 1000, "p": 0.5}, {"p": 0.0, "least": 3}, {"p": 1.0}, {"k": 2, "least": 7}]
)
def test_scores(launched: list[int], dtype: Any, given: dict[str, Any]) -> None:
    compared(drawn(dtype=dtype), processors(**given))
    compared(drawn(1, dtype=dtype), processors(**given)[: 1 if not given else 2])
    assert launched == [3, 3, 3, 1, 1, 1]


def special() -> dict[str, Any]:
    """Rows that a model may return, and those where most scores are equal, at the top, or no numbers."""
    found = {"in order": drawn(1).sort().values, "all equal": torch.full((1, VOCABULARY), -2.5)}
    found["few"] = drawn(1).masked_fill(torch.arange(VOCABULARY) % 500 > 0, -math.inf)
    found["none"] = torch.full((1, VOCABULARY), -math.inf)
    found["infinite"] = drawn(1).masked_fill(torch.arange(VOCABULARY) % 3000 == 1, math.inf)
    found["zeros of both signs"] = drawn(1).clamp(max=0.0) * torch.tensor([1.0, -1.0]).repeat(VOCABULARY // 2)
    for every in (8000, 200):  # NaN is not, and is, the 64th largest
        found[f"NaN, one of {every}"] = drawn(1).masked_fill(torch.arange(VOCABULARY) % every == 1, math.nan)
    return found


@pytest.mark.parametrize("name", special())
def test_special_scores(launched: list[int], name: str) -> None:
    compared(special()[name], processors())
    compared(special()[name], processors(k=1000, p=0.5))
    assert launched == [1] * 6


@pytest.mark.parametrize(
    ("scores", "both"),
    [
        (drawn(vocabulary=VOCABULARY + 4), processors()),
        (drawn(vocabulary=4096), processors()),
        (drawn().double(), processors()),
        (drawn(), processors(k=top_tokens.MOST + 1)),
        (drawn(), processors(filter_value=-1e4)),
        (drawn(), processors()[1:]),
    ],
    ids=["an odd number", "few scores", "float64", "many of them", "another filter value", "top-p alone"],
)
def test_what_does_not_suit_is_left_to_transformers(launched: list[int], scores: Any, both: list[Any]) -> None:
    compared(scores, both)
    assert not launched


def test_others_keep_their_places() -> None:
    top_k, top_p = processors()
    temperature, min_p = logits_process.TemperatureLogitsWarper(0.7), logits_process.MinPLogitsWarper(0.05)
    found = fast_processors.paired([temperature, top_k, top_p, min_p, top_k, temperature, top_p, top_p])
    assert [one if not isinstance(one, fast_processors.TopTokens) else (one.top_k, one.top_p) for one in found] == [
        *(temperature, (top_k, top_p), min_p, (top_k, None), temperature, (None, top_p), (None, top_p))
    ]


@pytest.mark.parametrize("vocabulary", [VOCABULARY, VOCABULARY + 1])
@pytest.mark.parametrize("samples", [True, False])
@pytest.mark.parametrize("more", [[], [logits_process.MinPLogitsWarper(0.05)]], ids=["", "min-p"])
def test_tokens_of_a_round_are_those_of_one_at_a_time(
    launched: list[int], vocabulary: int, samples: bool, more: list[Any]
) -> None:
    both = [logits_process.TemperatureLogitsWarper(0.7), *processors(), *more]
    scores, noise = drawn(5, vocabulary=vocabulary), None
    if samples:
        noise = torch.empty_like(scores).exponential_(generator=torch.Generator().manual_seed(0))
    choice, text = speculative_steps.Choice.of(both, samples=samples), torch.zeros((1, 5), dtype=torch.long)
    found = choice.tokens(text, scores[None], noise)
    expected = []
    for place, row in enumerate(scores.split(1)):
        left = by_transformers(row, both)
        expected.append(int(left.argmax() if noise is None else (left.softmax(-1) / noise[place]).argmax()))
    assert found.tolist() == [expected]
    assert launched == ([5] if vocabulary == VOCABULARY else [])


#: Each kernel, and what makes it wrong.
WRONG = {
    "_MAXIMA": ("max(found, key_of", "min(found, key_of"),
    "_LARGEST": ("places[j] < places[i]", "places[j] > places[i]"),
    "_KEPT": ("<= limit", "> limit"),
    "_DRAWN": ("quotient > 0.0f", "quotient > 0.5f"),
}


@pytest.mark.parametrize("name", WRONG)
def test_kernels_with_other_bits_are_not_used(
    launched: list[int],
    monkeypatch: pytest.MonkeyPatch,
    change_file: Callable[[str, str, str], None],
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    monkeypatch.setattr(kernels, "_kernels", {})
    change_file("top_tokens.cuh", *WRONG[name])
    caplog.set_level(logging.INFO, "gemma4_compat")
    for _ in range(2):
        compared(drawn(1), processors())
    assert not launched
    assert len([one for one in caplog.records if "transformers looks at all scores" in one.message]) == 1


def test_kernels_that_fail_are_not_used(
    launched: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no such architecture")

    monkeypatch.setattr(kernels, "_kernels", {})
    monkeypatch.setattr(HostCompiler, "compiled", fails)
    caplog.set_level(logging.INFO, "gemma4_compat")
    compared(drawn(), processors())
    assert not launched
    assert "no such architecture" in caplog.text


#: Options of a call, and of ``decode_fast``.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one text": ({}, {}),
    "with transformers' bits": ({}, {"exact": True}),
    "a batch": ({"batch": 3}, {}),
    "drafts": ({"prompt_lookup_num_tokens": 4}, {"assistants": True}),
}


@pytest.mark.parametrize("way", WAYS)
def test_texts(tapes: Any, launched: list[int], models: Models, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Replayed and fused; with as many words as a small model has, no row of which is added up as on CUDA."""
    monkeypatch.setattr(fused_steps.Progress, "after", 2)
    monkeypatch.setattr(top_tokens, "_LONG", 0)
    monkeypatch.setattr(top_tokens, "_DIVIDES", 1)
    kernels.of(CPU).prepare(top_tokens._TEXTS, [])
    found, (options, fast) = [], WAYS[way]
    for may_serve in (True, False):
        monkeypatch.setattr(top_tokens, "is_exact", lambda _device, told=may_serve: told)
        model = gemma4_compat.decode_fast(models.fresh(), **fast)
        prompt = calls.text(model, batch=options.get("batch", 1))
        given = SAMPLED | {name: value for name, value in options.items() if name != "batch"}
        torch.manual_seed(0)
        found += [model.generate(**prompt, **given).tolist() for _ in range(2)]
        assert calls.steps(model).replayed > 0
        assert bool(launched) == may_serve
        launched.clear()
    assert found[:2] == found[2:]
    assert found[0] != found[1]
