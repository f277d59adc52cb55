"""Prompts after ``decode_fast``: captured by their shape, replayed with the bits of a forward without a graph."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("bitsandbytes")

import gemma4_compat
from tests.unit.decoding.calls import (
    WINDOW,
    Models,
    assert_equal,
    generate,
    steps,
    text,
)

pytestmark = pytest.mark.usefixtures("tapes")
EAGER = {"disable_compile": True}
PLACES = [
    (None, None, "device"),
    ("4bit-double", "language", "device"),
    ("4bit", None, "streamed"),
    (None, "all", "host"),
]


def counts(model: Any) -> tuple[int, int]:
    found = steps(model)
    return found.prompts_captured, found.prompts_replayed


def fast(models: Models, *where: Any, exact: bool = True) -> Any:
    return gemma4_compat.decode_fast(models.fresh(*where), exact=exact)


def answers(model: Any, lengths: list[int], **options: Any) -> list[Any]:
    """Texts of these lengths, each another text."""
    return [generate(model, text(model, length, seed=seed), **options) for seed, length in enumerate(lengths)]


def same(model: Any, lengths: list[int], **options: Any) -> None:
    """The bits of calls that replay nothing."""
    found = answers(model, lengths, **options)
    before = counts(model)
    expected = answers(model, lengths, **options, **EAGER)
    assert counts(model) == before
    for one, other in zip(found, expected, strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize(("quantization", "adapter", "where"), PLACES)
def test_the_second_prompt_of_a_length_is_captured(
    models: Models, quantization: str | None, adapter: str | None, where: str
) -> None:
    model = fast(models, quantization, adapter, where)
    same(model, [5, 5, 5, 5])
    assert counts(model) == (1, 3)
    assert steps(model).reasons == ()


@pytest.mark.parametrize("length", [2, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW])
def test_lengths_around_the_window(models: Models, length: int) -> None:
    model = fast(models, None)
    same(model, [length] * 3)
    assert counts(model) == (1, 2)


@pytest.mark.parametrize("size", [3, WINDOW - 1, WINDOW, WINDOW + 2])
def test_chunks(models: Models, size: int) -> None:
    model = fast(models, None)
    options = {"prefill_chunk_size": size, "new": 5}
    same(model, [40, 40, 37], **options)
    captured, replayed = counts(model)
    assert replayed > captured > 0
    assert steps(model).reasons == ()
    answers(model, [40, 37], **options)
    again = counts(model)
    answers(model, [40, 37], **options)
    assert counts(model) == (again[0], again[1] + sum(length // size + (length % size > 1) for length in (40, 37)))
    assert steps(model).captured <= 2  # windows that are not full yet
