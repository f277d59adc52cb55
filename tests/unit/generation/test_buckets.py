"""Prompts in buckets of a few sizes: ``decode_fast(any_length=True)``."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("bitsandbytes")

import gemma4_compat
from gemma4_compat._generation.prompts import buckets, prompts
from gemma4_compat._graphs import decoder
from tests.unit.generation import calls
from tests.unit.generation.calls import WINDOW, Models, assert_equal, generate, steps, text

pytestmark = pytest.mark.usefixtures("tapes")
EAGER = {"disable_compile": True}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "SIZES", (4, 16))
    monkeypatch.setattr(buckets, "SMALL", 16)
    monkeypatch.setattr(buckets, "UNIT", 32)


def fast(models: Models, *where: Any, single: bool = True) -> Any:
    model = gemma4_compat.decode_fast(models.fresh(*where), any_length=True)
    return model.float() if single else model


def near(model: Any, given: dict[str, Any], **options: Any) -> Any:
    """In float32 the tokens of a prompt that is read at once, and logits that only round differently."""
    import torch

    found, expected = generate(model, given, **options), generate(model, given, EAGER, **options)
    assert torch.equal(found.sequences, expected.sequences)
    for one, other in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    return found


@pytest.mark.parametrize("length", [2, 3, 5, WINDOW, WINDOW + 1, WINDOW + 2, 16, 17, 18, 21, 33, 40])
def test_every_length(models: Models, length: int) -> None:
    model = fast(models, None)
    for seed in range(3):
        near(model, text(model, length, seed=seed), new=3)
    assert steps(model).prompts_replayed > 0
    assert steps(model).reasons == ()


def test_a_few_graphs_serve_all_lengths(models: Models) -> None:
    model = fast(models, None)
    calls.sized(model, 64)
    for length in (6, 30, 5, 40, 20, 12):
        near(model, text(model, length, seed=length))
    captured = steps(model).prompts_captured
    assert captured == 2
    before = steps(model).prompts_replayed
    for length in (7, 31, 4, 41, 24, 13):
        near(model, text(model, length, seed=length))
    assert steps(model).prompts_captured == captured
    assert steps(model).prompts_replayed - before == sum(-(-(length - 1) // 16) for length in (7, 31, 4, 41, 24, 13))


def test_a_text_that_grows(models: Models) -> None:
    """Each call is longer than all before: caches have few lengths."""
    model = fast(models, None)
    for length in range(8, 56, 3):
        near(model, text(model, length), cache_implementation=None)
    assert steps(model).prompts_captured <= 4
    assert steps(model).captured <= 4
    assert [buckets.room(tokens) for tokens in (1, 32, 33, 512, 513)] == [32, 32, 64, 512, 576]


@pytest.mark.parametrize(
    ("quantization", "adapter", "where"),
    [("4bit-double", "language", "device"), ("4bit", None, "device"), (None, "all", "host")],
)
def test_bits_do_not_depend_on_replays_or_on_calls_before(
    models: Models, monkeypatch: pytest.MonkeyPatch, quantization: str | None, adapter: str | None, where: str
) -> None:
    model = fast(models, quantization, adapter, where, single=False)
    lengths = (6, 20, 9, 20)
    options = {"cache_implementation": None}  # of one length: PyTorch's bits depend on it
    found = [generate(model, text(model, length, seed=length), **options) for _ in range(2) for length in lengths]
    assert steps(model).prompts_replayed > 8
    assert steps(model).reasons == ()
    gemma4_compat.decode_fast(model, enabled=False)
    gemma4_compat.decode_fast(model, any_length=True)
    monkeypatch.setattr(decoder, "MAX_PROMPTS", 0)
    monkeypatch.setattr(prompts, "run", lambda *_, **__: None)
    expected = [generate(model, text(model, length, seed=length), **options) for length in lengths]
    for one, other in zip(found, expected * 2, strict=True):
        assert_equal(one, other)


def test_rows_with_padding_and_beams(models: Models) -> None:
    model = fast(models, None)
    for length in (12, 30, 30, 30):
        near(model, text(model, length, batch=3, seed=length))
        near(model, text(model, length, batch=2, seed=length), num_beams=2)
    assert steps(model).prompts_replayed > 0


@pytest.mark.parametrize("lengths", [(3, 2, 20), (9, 17, 2), (30, 5, 40)])
def test_turns_on_one_cache(models: Models, lengths: tuple[int, ...]) -> None:
    """Other turns find windows that are filled in part, or full."""
    import torch

    model = fast(models, None)
    for _ in range(2):
        cache, other = calls.static_cache(model, 96), calls.static_cache(model, 96)
        ids = text(model, 2)["input_ids"][:, :0]
        for seed, length in enumerate(lengths):
            ids = torch.cat([ids, text(model, length, seed=seed)["input_ids"]], dim=-1)
            given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            found = generate(model, given, past_key_values=cache)
            expected = generate(model, given, EAGER, past_key_values=other)
            assert torch.equal(found.sequences, expected.sequences)
            torch.testing.assert_close(found.logits[0], expected.logits[0], rtol=1e-4, atol=1e-4)
            ids = found.sequences
    assert steps(model).prompts_replayed > 0


def test_what_is_read_as_before(models: Models) -> None:
    model = fast(models, None, single=False)
    given = text(model, 20)
    for options in (
        {"output_hidden_states": True},
        {"prefill_chunk_size": 7},
        {"logits_to_keep": 0},
    ):
        assert_equal(generate(model, given, **options), generate(model, given, EAGER, **options))
    images = models.workspace.inputs()
    assert_equal(generate(model, images), generate(model, images, EAGER))
    model.get_decoder().layers[-1].mlp.register_forward_pre_hook(_looks)
    assert_equal(generate(model, given), generate(model, given, EAGER))


def _looks(_module: Any, _inputs: Any) -> None:
    """A hook of the user's."""


_looks.__module__ = "__main__"


def test_streamed_layers_come_once(models: Models) -> None:
    model = fast(models, "4bit", None, "streamed", single=False)
    for _ in range(3):
        assert_equal(generate(model, text(model, 20)), generate(model, text(model, 20), EAGER))


def test_a_model_that_cannot_be_captured_reads_prompts_at_once(models: Models) -> None:
    model = fast(models, None, single=False)
    calls.failing(model, lambda states: float(states.sum()), layer=0)
    for _ in range(2):
        generate(model, text(model, 20))
    assert steps(model).prompts_captured == 0
    assert_equal(generate(model, text(model, 20)), generate(model, text(model, 20), EAGER))


def test_exact_prompts_are_not_cut(models: Models) -> None:
    with pytest.raises(gemma4_compat.Gemma4CompatError, match="any_length"):
        gemma4_compat.decode_fast(models(None), exact=True, any_length=True)


@pytest.mark.parametrize(
    ("tokens", "largest", "expected"),
    [
        (1, 2048, [(0, 1, 32)]),
        (100, 2048, [(0, 100, 128)]),
        (600, 2048, [(0, 512, 512), (512, 600, 128)]),
        (800, 2048, [(0, 800, 1024)]),
        (1100, 2048, [(0, 1024, 1024), (1024, 1100, 128)]),
        (4000, 2048, [(0, 2048, 2048), (2048, 4000, 2048)]),
        (1100, 512, [(0, 512, 512), (512, 1024, 512), (1024, 1100, 128)]),
    ],
)
def test_where_a_prompt_is_cut(
    monkeypatch: pytest.MonkeyPatch, tokens: int, largest: int, expected: list[tuple[int, int, int]]
) -> None:
    monkeypatch.setattr(buckets, "SIZES", (32, 64, 128, 256, 512, 1024, 2048))
    monkeypatch.setattr(buckets, "SMALL", 512)
    assert list(buckets.cut(tokens, largest)) == expected
    assert buckets.sizes(1)[0] == 2048
    assert buckets.sizes(3) == [512, 256, 128, 64, 32]


def test_pieces_are_smaller_where_memory_is_short(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first prompt decides, so that bits do not depend on the calls before."""
    monkeypatch.setattr(buckets, "SMALL", 4)
    monkeypatch.setattr(prompts, "has_room", lambda *given, **_: given[4] <= 4)
    model = fast(models, None)
    for seed in range(3):
        near(model, text(model, 30, seed=seed))
        assert decoder.of(calls.base(model)).largest_buckets == {(1, 33): 4}
        monkeypatch.setattr(prompts, "has_room", lambda *_, **__: True)
    assert steps(model).prompts_captured == 1
