"""Attention of prompts by kernels of this package, after ``decode_fast``."""

from __future__ import annotations

import logging
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")

import torch

import gemma4_compat
from gemma4_compat._graphs import decoder
from gemma4_compat._kernels.match import custom, reading
from gemma4_compat._kernels.specs import flash
from tests.unit.generation.calls import Models, assert_equal, generate, steps, text

NEAR = 0.25  # of the logits' standard deviation: tiny models in bf16
CHUNK, LENGTH = 20, 60
pytestmark = pytest.mark.usefixtures("kernels_on_host")


@pytest.fixture(autouse=True)
def narrow_heads(monkeypatch: pytest.MonkeyPatch) -> list[flash.Call]:
    """Full layers of tiny models, whose heads are 64 wide, can be computed. The calls that are tried."""
    monkeypatch.setitem(flash._TILINGS, 64, (flash.Tiling(128, 32, 4, 2, 1),))
    monkeypatch.setitem(reading.WITH_MASK, 64, True)
    monkeypatch.setattr(reading, "POSITIONS", 2)
    monkeypatch.setattr(reading._tests, "passed", {})
    monkeypatch.setattr(custom, "_broken", {})
    tried: list[flash.Call] = []
    trial = reading._trial
    monkeypatch.setattr(reading, "_trial", lambda call: tried.append(call) or trial(call))
    return tried


def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the queries that the kernels get from Python."""
    shapes: list[tuple[int, ...]] = []
    whole = flash.kernels

    def seen(call: flash.Call, *args: Any, **options: Any) -> Any:
        shapes.append(tuple(call.query.shape))
        return whole(call, *args, **options)

    monkeypatch.setattr(flash, "kernels", seen)
    return shapes


def fast(models: Models, quantization: str | None = "4bit-double", **options: Any) -> Any:
    return gemma4_compat.decode_fast(models.fresh(quantization), **options)


def chunks(model: Any, given: dict[str, Any], **options: Any) -> Any:
    return generate(model, given, prefill_chunk_size=CHUNK, **options)


def test_chunks(models: Models, monkeypatch: pytest.MonkeyPatch, narrow_heads: list[flash.Call]) -> None:
    """Captured or not they have the same bits, near PyTorch's, which ``exact`` brings back."""
    shapes = counted(monkeypatch)
    model, given = fast(models), text(models(None), LENGTH)
    found = [chunks(model, given) for _ in range(3)]
    assert steps(model).prompts_replayed > 0
    assert steps(model).reasons == ()
    assert {shape[2] for shape in shapes} >= {CHUNK}
    assert len(narrow_heads) == 1  # one kind of layers
    for other in found[1:]:
        assert_equal(found[0], other)
    gemma4_compat.decode_fast(model, enabled=False)
    gemma4_compat.decode_fast(model)
    monkeypatch.setattr(decoder, "MAX_PROMPTS", 0)
    assert_equal(found[0], chunks(model, given))
    gemma4_compat.decode_fast(model, exact=True)
    before = len(shapes)
    exact = chunks(model, given)
    assert len(shapes) == before
    difference = (exact.logits[0] - found[0].logits[0]).abs().max()
    assert 0 < difference < NEAR * exact.logits[0].std()


def test_undoing_brings_pytorchs_bits_back(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = models.fresh("4bit-double"), text(models(None), LENGTH)
    expected = chunks(model, given)
    gemma4_compat.decode_fast(model)
    assert not torch.equal(chunks(model, given).logits[0], expected.logits[0])
    gemma4_compat.decode_fast(model, enabled=False)
    assert_equal(chunks(model, given), expected)


def test_padding_and_pieces(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks with padding; in chunks and in buckets."""
    shapes = counted(monkeypatch)
    for options in ({}, {"any_length": True}):
        model = fast(models, **options)
        given = text(model, LENGTH, batch=2)
        found = chunks(model, given) if not options else generate(model, given)
        exact = generate(model, given, {"disable_compile": True})
        assert len(shapes) > 0
        shapes.clear()
        for row in range(2):
            difference = (exact.logits[0][row] - found.logits[0][row]).abs().max()
            assert difference < NEAR * exact.logits[0][row].std(), (options, row)


def test_a_trial_that_fails_leaves_it_to_pytorch(
    models: Models, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given, launch = text(models(None), LENGTH), custom.launch
    monkeypatch.setitem(reading.WITH_MASK, 64, False)
    expected = chunks(fast(models), given)
    monkeypatch.setitem(reading.WITH_MASK, 64, True)

    def wrong(device: Any, *launched: Any) -> None:
        launch(device, *launched)
        if "flash::" in launched[-1].text and launched[-1].tensors[-1].is_floating_point():
            launched[-1].tensors[-1].mul_(1.1)

    monkeypatch.setattr(custom, "launch", wrong)
    caplog.set_level(logging.WARNING, logger="gemma4_compat")
    model = fast(models)
    found = [chunks(model, given) for _ in range(2)]
    assert torch.equal(found[0].logits[0], expected.logits[0])
    assert torch.equal(found[1].logits[0], expected.logits[0])
    lines = [one.getMessage() for one in caplog.records if "attention of prompts" in one.getMessage()]
    assert len(lines) == 1
    assert "err by" in lines[0]


def test_short_caches_are_pytorchs(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "POSITIONS", 2048)
    shapes = counted(monkeypatch)
    chunks(fast(models), text(models(None), LENGTH))
    assert shapes == []


def test_no_copies_for_each_head(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that the kernels compute get keys of the cache; others get copies, as before."""
    seen: list[int] = []
    attention = reading.Reading._attention

    def asked(self: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(key.untyped_storage().nbytes())
        return attention(self, query, key, value, *args, **kwargs)

    monkeypatch.setattr(reading.Reading, "_attention", asked)
    model = fast(models)
    chunks(model, text(models(None), LENGTH))
    heads = model.config.get_text_config().num_attention_heads
    assert heads > 1
    assert min(seen) <= model.dtype.itemsize  # something without memory stands for copies


def test_a_prompt_at_once_needs_no_mask(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(reading.CAUSAL, 64, True)
    asked: list[flash.Call] = []
    match = flash.match

    def seen(*args: Any, **options: Any) -> Any:
        asked.append(match(*args, **options))
        return asked[-1]

    monkeypatch.setattr(flash, "match", seen)
    model, given = fast(models), text(models(None), LENGTH)
    found = generate(model, given)
    calls = [call for call in asked if call is not None and call.mask is None]
    assert model.config.get_text_config().num_attention_heads > 1
    assert (1, LENGTH) in {tuple(call.key.shape[1:3]) for call in calls}  # of the cache, not copied for each head
    exact = generate(gemma4_compat.decode_fast(model, exact=True), given)
    assert 0 < (exact.logits[0] - found.logits[0]).abs().max() < NEAR * exact.logits[0].std()


@pytest.mark.parametrize("where", ["host", "streamed"])
@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": CHUNK}], ids=["at once", "chunks"])
def test_the_same_bits_wherever_weights_lie(
    models: Models, monkeypatch: pytest.MonkeyPatch, where: str, options: dict[str, Any]
) -> None:
    monkeypatch.setitem(reading.CAUSAL, 64, True)
    whole, split = fast(models), gemma4_compat.decode_fast(models.fresh("4bit-double", None, where))
    shapes, given = counted(monkeypatch), text(whole, LENGTH)
    for _ in range(2):
        assert_equal(generate(split, given, **options), generate(whole, given, **options))
    assert len(shapes) > 0
