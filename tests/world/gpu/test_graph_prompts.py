"""Prompts replayed as CUDA graphs after ``decode_fast``, on tiny models; the cases are those of the CPU."""

from __future__ import annotations

from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._generation.prompts import buckets, prompts
from gemma4_compat._graphs import decoder
from tests.unit.generation.calls import WINDOW, Models, assert_equal, base, generate, other_media, steps, text

CELLS = [
    (None, None, "device"),
    ("4bit-double", "language", "device"),
    ("4bit", None, "host"),
    (None, "all", "streamed"),
]
EAGER = {"disable_compile": True}


@pytest.fixture(scope="module")
def models(workspace: Any) -> Models:
    return Models(workspace)


@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": WINDOW}, {"prefill_chunk_size": 5}, {"num_beams": 2}])
@pytest.mark.parametrize(("quantization", "adapter", "where"), CELLS)
def test_prompts_have_the_bits_of_prompts_without_a_replay(
    models: Models, quantization: str | None, adapter: str | None, where: str, options: dict[str, Any]
) -> None:
    model = gemma4_compat.decode_fast(models.fresh(quantization, adapter, where), exact=True)
    for length in (3, WINDOW, 24):
        for seed in range(3):
            given = text(model, length, batch=1 + seed % 2 if length == WINDOW else 1, seed=seed)
            assert_equal(generate(model, given, **options), generate(model, given, EAGER, **options))
    counted = steps(model)
    assert counted.prompts_replayed >= counted.prompts_captured > 0
    assert counted.reasons == ()


@pytest.mark.parametrize(("quantization", "adapter", "where"), CELLS)
def test_so_have_prompts_with_other_images_and_sounds(
    models: Models, quantization: str | None, adapter: str | None, where: str
) -> None:
    model = gemma4_compat.decode_fast(models.fresh(quantization, adapter, where), exact=True)
    for seed in range(4):
        given = other_media(models.workspace.inputs(), seed)
        assert_equal(generate(model, given), generate(model, given, EAGER))
    assert (steps(model).prompts_captured, steps(model).prompts_replayed) == (1, 3)
    assert steps(model).reasons == ()


@pytest.mark.parametrize(("quantization", "adapter", "where"), CELLS)
def test_so_have_prompts_with_fused_kernels(
    models: Models, monkeypatch: pytest.MonkeyPatch, quantization: str | None, adapter: str | None, where: str
) -> None:
    monkeypatch.setattr(prompts.Progress, "after", 2)
    model = gemma4_compat.decode_fast(models.fresh(quantization, adapter, where), exact=True)
    for seed in range(6):
        given = text(model, 24, seed=seed)
        assert_equal(generate(model, given), generate(model, given, EAGER))
    assert (steps(model).prompts_captured, steps(model).prompts_fused, steps(model).not_fused) == (1, 1, ())


@pytest.mark.parametrize("where", ["device", "host"])
def test_pieces_are_near_prompts_that_are_read_at_once(
    models: Models, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    import torch

    monkeypatch.setattr(buckets, "SIZES", (4, 16))
    monkeypatch.setattr(buckets, "SMALL", 16)
    model = gemma4_compat.decode_fast(models.fresh("4bit", None, where), any_length=True)
    for length in (5, 12, 17, 33, 40, 6):
        given = text(model, length, batch=2, seed=length)
        found, expected = (generate(model, given, way, new=1).logits[0] for way in ({}, EAGER))
        assert (found - expected).abs().max() < expected.std()  # bfloat16, random weights: 0.57 of it on an H100
        assert torch.equal(found, generate(model, given, new=1).logits[0])
    assert steps(model).prompts_replayed > 0
    assert steps(model).reasons == ()


def test_graphs_give_their_memory_back(models: Models) -> None:
    import torch

    model = gemma4_compat.decode_fast(models.fresh("4bit"), exact=True)
    for seed in range(4):
        generate(model, text(model, 300, seed=seed))
    kept = decoder.of(base(model))
    assert steps(model).prompts_captured == 1
    assert kept.prompts.nbytes > 0
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    gemma4_compat.decode_fast(model, enabled=False)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < before
