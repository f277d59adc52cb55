"""A prompt with fused kernels has the bits of the prompt without, or it stays without."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("bitsandbytes")

import gemma4_compat
from gemma4_compat._generation.prompts import prompts
from gemma4_compat._graphs import fused_steps
from gemma4_compat._kernels import kernels
from tests.unit.generation import calls
from tests.unit.generation.calls import EAGER, PLACES, WINDOW, Models, assert_equal, fast, generate, steps, text


@pytest.fixture(autouse=True)
def fusing(kernels_on_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts on the CPU are fused, in the second replay of a length; steps are not."""
    monkeypatch.setattr(prompts.Progress, "after", 2)


def same(model: Any, lengths: list[int], **options: Any) -> None:
    """The bits of calls that replay nothing, for texts of these lengths."""
    for seed, length in enumerate(lengths):
        given = text(model, length, batch=options.get("batch", 1), seed=seed)
        asked = {name: value for name, value in options.items() if name != "batch"}
        assert_equal(generate(model, given, **asked), generate(model, given, EAGER, **asked))


def counts(model: Any) -> tuple[int, int]:
    found = steps(model)
    return found.prompts_captured, found.prompts_fused


@pytest.mark.parametrize(("quantization", "adapter", "where"), PLACES)
def test_answers_are_the_same(models: Models, quantization: str | None, adapter: str | None, where: str) -> None:
    model = fast(models, quantization, adapter, where)
    same(model, [6] * 6)
    assert (counts(model), steps(model).prompts_replayed) == ((1, 1), 5)
    assert (steps(model).not_fused, steps(model).reasons) == ((), ())


@pytest.mark.parametrize("length", [2, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW])
def test_lengths_around_the_window(models: Models, length: int) -> None:
    model = fast(models, None)
    same(model, [length] * 5)
    assert counts(model) == (1, 1)


def test_rows_with_padding(models: Models) -> None:
    model = fast(models, None)
    same(model, [6] * 5, batch=2)
    assert counts(model) == (1, 1)


def test_chunks_and_turns(models: Models) -> None:
    """The cache is in use when a chunk is fused: two replays leave what one would."""
    model = fast(models, None)
    same(model, [40] * 5, prefill_chunk_size=WINDOW - 1, new=5)
    captured, fused = counts(model)
    assert captured == fused > 1
    run = calls.turns(model)
    found = [run({}) for _ in range(6)]
    for one, other in zip(found[-1], run(EAGER), strict=True):
        assert_equal(one, other)
    assert counts(model)[1] > fused
    assert steps(model).not_fused == ()


def test_images_and_sounds(models: Models) -> None:
    model = fast(models, None)
    for seed in range(5):
        given = calls.other_media(models.workspace.inputs(), seed)
        assert_equal(generate(model, given), generate(model, given, EAGER))
    assert counts(model) == (1, 1)
    assert steps(model).not_fused == ()


def test_pieces(models: Models) -> None:
    model = gemma4_compat.decode_fast(models.fresh(None), any_length=True)
    before = [generate(model, text(model, length, seed=length)) for length in (20, 40)]
    for length in (21, 22, 23, 41, 42, 43):
        generate(model, text(model, length, seed=length))
    after = [generate(model, text(model, length, seed=length)) for length in (20, 40)]
    assert counts(model)[1] > 0
    assert steps(model).not_fused == ()
    for one, other in zip(before, after, strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize("what", ["in place", "new parameter", "another module", "number", "class of a module"])
@pytest.mark.parametrize("replays", [1, 3])
def test_a_change_is_noticed(models: Models, what: str, replays: int) -> None:
    """Before the replay in which a prompt would be fused, and after it."""
    model = fast(models, None)
    same(model, [5] * (1 + replays))
    assert counts(model) == (1, int(replays > 1))
    before = generate(model, text(model, 5, seed=9), EAGER)
    calls.CHANGES[what](model)
    found = generate(model, text(model, 5, seed=9))
    assert not found.logits[0].equal(before.logits[0])
    assert_equal(found, generate(model, text(model, 5, seed=9), EAGER))
    same(model, [5] * 5)


def test_other_bits_leave_the_prompt_as_it_was(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fast(models, None)
    monkeypatch.setattr(fused_steps, "_are_equal", lambda *_: False)
    same(model, [5] * 5)
    assert counts(model) == (1, 0)
    (reason,) = steps(model).not_fused
    assert "differs bitwise" in reason


def test_a_failed_capture_leaves_the_prompt_as_it_was(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fast(models, None)

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernel today")

    monkeypatch.setattr(kernels.Kernels, "launch", fails)
    same(model, [5] * 6)
    assert (counts(model), steps(model).prompts_replayed) == ((1, 0), 5)
    assert steps(model).not_fused == ("RuntimeError: no kernel today",)


def test_long_prompts_are_not_fused(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MAX_FUSED", 11)
    model = fast(models, None)
    same(model, [6] * 5, batch=2)
    assert counts(model) == (1, 0)
    same(model, [11] * 5)
    assert counts(model) == (2, 1)
