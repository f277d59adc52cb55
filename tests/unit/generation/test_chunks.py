"""Prompts that do not fit into memory at once, after ``decode_fast``: read in chunks, and only then.

The memory is a stand-in: a layer raises ``torch.OutOfMemoryError`` for more tokens than it is said to hold.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")

import gemma4_compat
from gemma4_compat._engine import versions
from gemma4_compat._gemma4 import host
from gemma4_compat._gemma4.cache import cache_names
from gemma4_compat._generation.prompts import chunks, prompts
from gemma4_compat._graphs import decoder, static_caches
from gemma4_compat._graphs.statistics import Cause
from gemma4_compat._kernels.specs import flash
from gemma4_compat._lab.tiny import without
from tests.unit.generation import calls
from tests.unit.generation.calls import WINDOW, Models, assert_equal, generate, steps, text

pytestmark = pytest.mark.usefixtures("tapes")
SIZES = (24, 12, 6, 3)
VERSION = versions.installed("transformers") or "0"
#: Forwards of a layer, by their tokens.
Forwards = list[int]
Fast = Callable[..., tuple[Any, Forwards]]


@pytest.fixture
def fast(models: Models, monkeypatch: pytest.MonkeyPatch) -> Fast:
    """A model after ``decode_fast``, whose memory holds forwards of so many tokens, and the forwards of a layer."""
    import torch

    monkeypatch.setattr(chunks, "SIZES", SIZES)

    def made(holds: int, *where: Any, layer: int = 3, **options: Any) -> tuple[Any, Forwards]:
        model = models.fresh(*(where or (None,)))
        gemma4_compat.decode_fast(model, **{"exact": True, **options})
        forwards: Forwards = []

        def allocates(states: Any) -> None:
            forwards.append(states.shape[1])
            if states.shape[1] > holds:
                raise torch.OutOfMemoryError("CUDA out of memory")

        calls.failing(model, allocates, layer)
        return model, forwards

    return made


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Have the device say how many bytes are left."""

    def said(nbytes: int) -> None:
        monkeypatch.setattr(chunks, "_FEW", 0)
        monkeypatch.setattr(host, "free_memory", lambda device, kept=0: nbytes)

    return said


def in_chunks(model: Any) -> int:
    return int(steps(model).prompts_in_chunks)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize(
    ("quantization", "adapter", "where"),
    [(None, None, "device"), ("4bit", "language", "device"), ("4bit", None, "streamed")],
)
def test_a_prompt_that_runs_out_of_memory_is_read_in_chunks(
    fast: Fast, quantization: str | None, adapter: str | None, where: str, layer: int, exact: bool
) -> None:
    """With the bits of the same chunks, asked for by the user."""
    model, forwards = fast(13, quantization, adapter, where, layer=layer, exact=exact)
    found = generate(model, text(model, 40))
    assert [size for size in forwards if size > 13] == [40, 24]
    assert in_chunks(model) == 2
    assert_equal(found, generate(model, text(model, 40), prefill_chunk_size=12))


def test_what_fits_is_read_at_once(fast: Fast, models: Models) -> None:
    model, forwards = fast(40)
    found = generate(model, text(model, 40))
    assert forwards[0] == 40
    assert in_chunks(model) == 0
    gemma4_compat.decode_fast(model, enabled=False)
    assert_equal(found, generate(model, text(model, 40), {"disable_compile": True}))


def test_one_line_says_so(fast: Fast, caplog: pytest.LogCaptureFixture) -> None:
    model, _ = fast(30)
    with caplog.at_level(logging.WARNING, "gemma4_compat"):
        for _ in range(2):
            generate(model, text(model, 40))
    (line,) = [record.getMessage() for record in caplog.records if "chunks" in record.getMessage()]
    assert "a prompt is read in chunks of 24 tokens" in line
    assert line.endswith("it ran out of memory")


def test_an_estimate_spares_the_attempt(fast: Fast, free: Callable[[int], None]) -> None:
    model, forwards = fast(1000, exact=False)
    cache = calls.static_cache(model, 44)
    needed = chunks.Room(model, cache, 1, 40).needed
    assert needed() > needed(24) > needed(12) > needed(6)
    free(needed(12))
    found = generate(model, text(model, 40))
    assert max(forwards) == 12
    assert in_chunks(model) == 1
    assert_equal(found, generate(model, text(model, 40), prefill_chunk_size=12))
    free(needed())
    generate(model, text(model, 40))
    assert max(forwards) == 40
    assert in_chunks(model) == 1


def test_our_attention_needs_less_and_is_tried_only_where_there_is_room(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    model = gemma4_compat.decode_fast(models.fresh(None))
    tried: list[Any] = []
    monkeypatch.setattr(flash, "WORKSPACE", 0)  # more than all that a tiny model takes

    def needed(computes: Callable[[], bool]) -> list[int]:
        monkeypatch.setattr(prompts, "computes_attention", lambda *given: tried.append(given[3]) or computes())
        memory = chunks.Room(model, calls.static_cache(model, 4096), 1, 4000)
        return [memory.needed(), memory.needed(512)]

    def no_room() -> bool:
        raise torch.OutOfMemoryError("CUDA out of memory")

    theirs, ours = needed(lambda: False), needed(lambda: True)
    assert needed(no_room) == theirs
    assert all(one < other for one, other in zip(ours, theirs, strict=True))
    text_config = model.config.get_text_config()
    widths = {text_config.head_dim, text_config.global_head_dim}
    assert [{width for *_, width in heads} for heads in tried] == [widths] * 3


def test_exact_bits_are_not_given_up_for_an_estimate(fast: Fast, free: Callable[[int], None]) -> None:
    model, forwards = fast(1000)
    free(1)
    generate(model, text(model, 40))
    assert max(forwards) == 40
    assert in_chunks(model) == 0


def test_after_memory_ran_out_the_largest_chunk_that_fits_is_next(fast: Fast, free: Callable[[int], None]) -> None:
    model, forwards = fast(39)
    free(chunks.Room(model, calls.static_cache(model, 44), 1, 40).needed(6))
    generate(model, text(model, 40))
    assert [size for size in forwards if size > 1][:2] == [40, 6]


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}, {"batch": 2}])
def test_beams_samples_and_padding(fast: Fast, options: dict[str, Any]) -> None:
    model, _ = fast(13)
    batch = text(model, 40, batch=options.pop("batch", 1))
    found = generate(model, batch, **options)
    assert in_chunks(model) > 0
    assert_equal(found, generate(model, batch, prefill_chunk_size=12, **options))


@pytest.mark.parametrize("said", [3, WINDOW + 5])
def test_a_second_turn_finds_the_cache_as_it_was(fast: Fast, free: Callable[[int], None], said: int) -> None:
    """The windows of sliding layers are those of the first turn again."""
    import torch

    if versions.admits("<5.22", VERSION):
        pytest.skip("this transformers reads a second turn in chunks as if the cache were empty")
    model, _ = fast(13)
    free(chunks.Room(model, calls.static_cache(model), 1, 30).needed())  # for one such forward, not for two

    def turns(**second: Any) -> Any:
        cache = calls.static_cache(model)
        first = generate(model, text(model, said), past_key_values=cache)
        ids = torch.cat([first.sequences, text(model, 30, seed=1)["input_ids"]], dim=-1)
        return generate(
            model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, past_key_values=cache, **second
        )

    found = turns()
    assert in_chunks(model) == 2
    assert_equal(found, turns(prefill_chunk_size=12))
    free(1 << 40)  # nothing was copied
    with pytest.raises(torch.OutOfMemoryError):
        turns()


@pytest.mark.parametrize("held", [0, 3, WINDOW + 5])
def test_a_cache_is_restored_bit_by_bit(models: Models, held: int) -> None:
    import torch

    model = models.fresh(None)
    cache = calls.static_cache(model)
    name = {cache_names.of(type(model).forward): cache}

    def state() -> list[Any]:
        counted = [layer.cumulative_length_int for layer in static_caches.sliding(cache)]
        return [tensor.clone() for tensor in static_caches.tensors(cache) or ()] + counted

    with torch.no_grad():
        model(**text(model, held or 2), **name, use_cache=True)
        if not held:
            static_caches.empty(cache)
        before = static_caches.Held(cache)
        expected = state()
        ids = text(model, 20, seed=1)["input_ids"]
        model(input_ids=ids, position_ids=torch.arange(held, held + 20)[None], **name, use_cache=True)
    changed = state()
    before.restore()
    assert all(map(_same, state(), expected))
    assert not all(map(_same, changed, expected))


def _same(one: Any, other: Any) -> bool:
    return one == other if isinstance(one, int) else bool(one.equal(other))


def test_images_are_cut_where_transformers_can(fast: Fast, models: Models) -> None:
    model, _ = fast(15)
    batch = without(models.workspace.inputs(), "input_features")
    if versions.admits("<5.23", VERSION):
        _runs_out(model, batch)
        return
    found = generate(model, batch)
    assert in_chunks(model) > 0
    assert_equal(found, generate(model, batch, prefill_chunk_size=12))


def test_what_cannot_be_cut_runs_out_of_memory_as_before(fast: Fast, models: Models) -> None:
    from transformers import DynamicCache

    model, _ = fast(13)
    batch = text(model, 40)
    _runs_out(model, models.workspace.inputs())  # with sounds
    _runs_out(model, batch, output_hidden_states=True)
    _runs_out(model, batch, logits_to_keep=0)
    _runs_out(model, batch, prefill_chunk_size=24)  # the user's wins
    _runs_out(model, batch, past_key_values=DynamicCache(config=model.config))
    _runs_out(model, batch, cache_implementation=None, use_cache=False)
    assert in_chunks(model) == 0
    gemma4_compat.decode_fast(model, enabled=False)
    _runs_out(model, batch)


def _runs_out(model: Any, batch: dict[str, Any], **options: Any) -> None:
    import torch

    given = {"cache_implementation": None} if cache_names.cache_in(options) is not None else {}
    with pytest.raises(torch.OutOfMemoryError):
        generate(model, batch, **given, **options)


def test_where_no_chunk_fits_the_error_is_raised(fast: Fast) -> None:
    model, forwards = fast(2)
    _runs_out(model, text(model, 40))
    assert forwards == [40, 24, 12, 6, 3]
    generate(model, text(model, 2))


def test_before_the_error_is_raised_all_graphs_are_given_back(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Including those of steps. The last attempt captures none, because it would run out of memory again."""
    import torch

    monkeypatch.setattr(chunks, "SIZES", SIZES)
    model = gemma4_compat.decode_fast(models.fresh(None), exact=True)
    model.generation_config.max_cache_len = 64  # graphs serve both texts
    decoding, forwards = decoder.of(model), []
    full = False

    def allocates(states: Any) -> None:
        forwards.append(states.shape[1])
        if full and states.shape[1] > 1 and decoding.captured:
            raise torch.OutOfMemoryError("CUDA out of memory")

    calls.failing(model, allocates, 3)
    generate(model, text(model, 9))
    assert decoding.captured
    full = True
    forwards.clear()
    found = generate(model, text(model, 40, seed=1))
    assert [size for size in forwards if size > 1] == [40, 24, 12, 6, 3, *(3,) * 13]
    assert steps(model).recaptures[Cause.MEMORY] == 1
    assert not decoding.prompts._paused
    gemma4_compat.decode_fast(model, enabled=False)
    assert_equal(found, generate(model, text(model, 40, seed=1), {"disable_compile": True}, prefill_chunk_size=3))


def test_several_processes_read_at_once(fast: Fast, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward may be one of all processes: none reads it again on its own."""
    import torch

    model, _ = fast(13)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(torch.OutOfMemoryError):
        generate(model, text(model, 40))


def test_pieces_that_run_out_of_memory(fast: Fast) -> None:
    model, _ = fast(13, exact=False, any_length=True)
    found = generate(model, text(model, 40))
    assert in_chunks(model) > 0
    assert_equal(found, generate(model, text(model, 40), prefill_chunk_size=12))


@pytest.mark.parametrize("way", [{"disable_compile": True}, {}])
def test_a_model_that_the_planner_does_not_know(
    fast: Fast, free: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, way: dict[str, Any]
) -> None:
    """It is read at once, and in chunks after memory ran out. Without replays, an estimate does not count either."""
    model, forwards = fast(13, exact=False)
    free(1)
    if not way:
        monkeypatch.setattr(chunks, "describe", lambda _model: 1 // 0)
    found = generate(model, text(model, 40), way)
    assert forwards[0] == 40
    assert_equal(
        found, generate(model, text(model, 40), way, prefill_chunk_size=next(size for size in forwards if size <= 13))
    )


def test_short_prompts_are_not_looked_at(fast: Fast, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory is not worth a look at the model."""
    model, _ = fast(1000, exact=False)
    monkeypatch.setattr(chunks, "shapes", lambda _model: pytest.fail("looked at"))
    monkeypatch.setattr(host, "free_memory", lambda device, kept=0: 1)
    generate(model, text(model, 40))
    assert in_chunks(model) == 0


@pytest.mark.parametrize(
    ("tokens", "batch", "streams", "expected"),
    [
        (32768, 1, True, [8192, 4096, 2048, 1024, 512, 256, 128]),
        (32768, 1, False, [2048, 1024, 512, 256, 128]),
        (32768, 4, False, [512, 256, 128]),
        (32768, 64, False, [128]),
        (1000, 1, True, [512, 256, 128]),
        (128, 1, False, []),
    ],
)
def test_sizes(tokens: int, batch: int, streams: bool, expected: list[int]) -> None:
    assert chunks.sizes(tokens=tokens, batch=batch, streams=streams) == expected


def test_the_first_size_that_fits_or_the_last() -> None:
    assert chunks.first_that_fits([512, 256, 128], lambda size: size <= 256) == 256
    assert chunks.first_that_fits([512, 256], lambda size: size <= 100) == 256
    assert chunks.first_that_fits([], lambda size: True) is None


def test_a_model_that_cannot_be_cut_is_not(models: Models) -> None:
    model = models.fresh(None)
    assert chunks.may_be_cut(model, text(model, 5)["input_ids"], model.generation_config, {}) == 0
