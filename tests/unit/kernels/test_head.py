"""The head in two stages, against the whole head: the words that can be chosen have its bits, and no other one is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from gemma4_compat._engine.io.bits import same_bits
from gemma4_compat._kernels import kernels
from gemma4_compat._kernels.match import custom
from gemma4_compat._kernels.specs import head
from tests.unit.kernels.host_kernels import HostCompiler

WORDS, INPUTS, MOST, CAP = 601, 128, 8, 30.0
pytestmark = pytest.mark.skipif(
    HostCompiler.unsupported_reason() is not None, reason=str(HostCompiler.unsupported_reason())
)
Make = Callable[[torch.Generator], Any]
HEADS: dict[str, Make] = {}


@pytest.fixture(autouse=True)
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernels.COMPILERS, "cpu", HostCompiler)
    monkeypatch.setattr(head, "LEAST", 0)


def _head(make: Make) -> Make:
    HEADS[make.__name__.strip("_").replace("_", " ")] = make
    return make


def normal(generator: torch.Generator, *shape: int) -> Any:
    return torch.randn(shape or (WORDS, INPUTS), generator=generator) * INPUTS**-0.5


@_head
def _gaussian(generator: torch.Generator) -> Any:
    return normal(generator)


@_head
def _heavy_tails(generator: torch.Generator) -> Any:
    return normal(generator) * normal(generator).abs().pow(1.5) * 8


@_head
def _outlier_columns(generator: torch.Generator) -> Any:
    weight = normal(generator)
    weight[:, :8] *= 12
    return weight


@_head
def _rows_of_all_sizes(generator: torch.Generator) -> Any:
    return normal(generator) * torch.randint(-60, 12, (WORDS, 1), generator=generator).float().exp2()


@_head
def _every_row_twice(generator: torch.Generator) -> Any:
    return normal(generator, WORDS // 2 + 1, INPUTS).repeat(2, 1)[:WORDS]


@_head
def _few_words_that_differ(generator: torch.Generator) -> Any:
    return normal(generator, 7, INPUTS).repeat(WORDS // 7 + 1, 1)[:WORDS]


@_head
def _zeros(_generator: torch.Generator) -> Any:
    return torch.zeros(WORDS, INPUTS)


@_head
def _most_rows_zero(generator: torch.Generator) -> Any:
    weight = normal(generator)
    weight[5:] = 0
    return weight


@_head
def _large_logits(generator: torch.Generator) -> Any:
    return normal(generator) * 300  # their soft cap makes many of them equal


@_head
def _tiny_numbers(generator: torch.Generator) -> Any:
    return normal(generator) * 1e-30


@_head
def _a_row_not_a_number(generator: torch.Generator) -> Any:
    weight = normal(generator)
    weight[17, 3] = math.nan
    return weight


@_head
def _infinite_rows(generator: torch.Generator) -> Any:
    weight = normal(generator)
    weight[40, 3], weight[500, 100] = math.inf, -math.inf
    return weight


def states(generator: torch.Generator, weight: Any, rows: int = 2) -> Any:
    """Hidden states with outliers; the second one makes a word likely."""
    found = torch.randn((rows, INPUTS), generator=generator)
    found[0, torch.randint(INPUTS, (6,), generator=generator)] *= 20
    if rows > 1 and bool(weight[400].isfinite().all()):
        found[1] += weight[400] / weight[400].norm().clamp(min=1e-30) * INPUTS**0.5
    return found


def computed(given: Any, weight: Any, most: int = MOST, cap: float = CAP) -> tuple[Any, Any, Any]:
    """The logits of both stages, those of the whole head, and what the first one counted."""
    assert head.unsupported_reason(weight) is None
    copy = head.Copy.of(weight)
    custom.launch(weight.device, copy.made_from(weight))
    found = custom.operator("best")(given, weight, *copy, most, cap)
    return found, custom.operator("dense")(given, weight, None), copy.counts


def capped(logits: Any, cap: float = CAP) -> Any:
    """As the model does it."""
    return torch.tanh(logits / cap) * cap if cap else logits


def compare(found: Any, whole: Any, most: int = MOST, cap: float = CAP) -> None:
    """The best words, and those equal to the last of them, have the bits of the whole head; the token is the same."""
    kept = found != -math.inf
    assert torch.equal(found.view(torch.int16)[kept], whole.view(torch.int16)[kept])
    ours, theirs = capped(found, cap).float(), capped(whole, cap).float()
    assert ours.argmax(-1).tolist() == theirs.argmax(-1).tolist()
    last = theirs.topk(most).values[..., -1:]
    assert same_bits(ours.masked_fill(ours < last, -math.inf), theirs.masked_fill(theirs < last, -math.inf))


@pytest.mark.parametrize(
    ("name", "dtype", "rows"),
    [
        *itertools.product(HEADS, (torch.bfloat16, torch.float16), (2,)),
        *itertools.product(HEADS, (torch.bfloat16,), (9,)),
        ("heavy tails", torch.float16, 34),
        ("gaussian", torch.bfloat16, 64),
    ],
    ids=str,
)
def test_the_best_words_are_those_of_the_whole_head(name: str, dtype: Any, rows: int) -> None:
    generator = torch.Generator().manual_seed(len(name))
    weight = HEADS[name](generator).to(dtype)
    given = states(generator, weight.float(), rows).to(dtype)
    for most, cap in ((MOST, CAP), (1, 0.0)):
        found, whole, counts = computed(given, weight, most, cap)
        compare(found, whole, most, cap)
        all_words = len(given) * WORDS
        if bool(weight.isfinite().all()):
            assert counts.tolist() == [int((found != -math.inf).sum()), len(given)]
            assert name != "gaussian" or counts[0] < all_words // 4
        else:
            assert counts[0] == all_words


@pytest.mark.parametrize("rows", [2, 10])
def test_what_is_not_finite_computes_the_whole_head(rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = normal(generator).bfloat16()
    for value in (math.nan, math.inf, 1e38):
        given = states(generator, weight.float(), rows).bfloat16()
        given[1, 7] = value
        found, whole, _ = computed(given, weight)
        others = [row for row in range(rows) if row != 1]
        compare(found[others], whole[others])
        assert torch.equal(found[1].view(torch.int16), whole[1].view(torch.int16)), value


@pytest.mark.parametrize(
    "wrong",
    [
        ("dense::over_lanes(sums[0]);", ""),
        ("score - bound;", "score + 9.0f;"),
        ("all >= k", "all >= 1u"),
        ("* HALF + less[i", "* -HALF + less[i"),
    ],
)
def test_kernels_with_other_bits_are_not_used(
    monkeypatch: pytest.MonkeyPatch, change_file: Callable[[str, str, str], None], wrong: tuple[str, str]
) -> None:
    weight = normal(torch.Generator().manual_seed(0)).bfloat16()
    assert custom.computes_best_words(weight)
    monkeypatch.setattr(kernels, "_kernels", {})
    change_file("head.cuh", *wrong)
    assert not custom.computes_best_words(weight)
