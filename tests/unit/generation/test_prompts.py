"""Prompts after ``decode_fast``: captured by their shape, replayed with the bits of a forward without a graph."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")

import gemma4_compat
from gemma4_compat._gemma4.cache import cache_names
from gemma4_compat._generation.prompts import prompts
from gemma4_compat._graphs import captured_calls, decoder
from tests.helpers import holders
from tests.unit.generation import calls
from tests.unit.generation.calls import (
    EAGER,
    PLACES,
    WINDOW,
    Models,
    assert_equal,
    fast,
    generate,
    layers,
    steps,
    text,
)
from tests.unit.offload import threads

pytestmark = pytest.mark.usefixtures("tapes")


def counts(model: Any) -> tuple[int, int]:
    found = steps(model)
    return found.prompts_captured, found.prompts_replayed


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


def test_one_graph_serves_only_what_a_forward_finds_in_masks_and_caches(models: Models) -> None:
    """Masks of one shape, and a mask that is None, do not say everything that Python decides by."""
    import torch
    from transformers import StaticCache

    model = fast(models, None)

    def signature(length: int, hidden: int) -> Any:
        ids, sliding = torch.ones(1, 5, dtype=torch.long), torch.ones(1, 1, 5, WINDOW, dtype=torch.bool)
        sliding[..., :hidden] = False
        cache = StaticCache(config=model.config.get_text_config(), max_cache_len=length)
        masks = {"full_attention": None, "sliding_attention": sliding}
        inputs = {"input_ids": ids, "attention_mask": masks, "position_ids": ids.cumsum(1) - 1, "logits_to_keep": 1}
        made = prompts.Prompt.of(decoder.of(model), model, inputs | {cache_names.NEW: cache})
        assert made is not None
        return made.signature

    assert signature(32, 0) == signature(32, 0)
    assert len({signature(32, 0), signature(32, 1), signature(64, 0)}) == 3


def test_the_python_of_a_model_does_not_run_in_a_replay(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    model, runs = fast(models, None), []
    answers(model, [5, 5])
    mlp = type(layers(model)[0].mlp)
    original = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda self, x: runs.append(1) or original(self, x))
    answers(model, [5])  # a class has changed
    answers(model, [5])
    runs.clear()
    answers(model, [5])
    assert runs == []


def test_rows_with_padding_beams_and_sampling(models: Models) -> None:
    model = fast(models, None)
    for options in ({"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}):
        same(model, [6] * 3, **options)
    for seed in (1, 1, 2):
        given = text(model, 6, batch=2, seed=seed)
        assert_equal(generate(model, given), generate(model, given, EAGER))
    captured, replayed = counts(model)
    assert (captured, replayed) in ((3, 6), (2, 7))  # before transformers 5.15 one cache serves two rows of all kinds


def test_turns_on_one_cache_of_the_user(models: Models) -> None:
    model = fast(models, None)
    run = calls.turns(model)
    found = [run({}) for _ in range(3)]
    for one, other in zip(found[-1], run(EAGER), strict=True):
        assert_equal(one, other)
    assert steps(model).reasons == ()


@pytest.mark.parametrize("options", [{"output_hidden_states": True}, {"logits_to_keep": 0}, {"use_cache": False}])
def test_outputs_of_every_position_are_no_prompts(models: Models, options: dict[str, Any]) -> None:
    model = fast(models, None)
    same(model, [5] * 3, **options)
    assert counts(model) == (0, 0)


def test_custom_kernels_read_prompts_the_same_way(models: Models) -> None:
    """Without a compiler on the CPU, steps keep PyTorch's bits."""
    model = fast(models, None, exact=False)
    same(model, [5] * 3)
    assert counts(model) == (1, 2)


def test_only_after_decode_fast(models: Models) -> None:
    model = fast(models, "4bit")
    gemma4_compat.decode_fast(model, enabled=False)
    answers(model, [5] * 3)
    assert steps(model).replayed > 0
    assert counts(model) == (0, 0)
    gemma4_compat.decode_fast(model)
    answers(model, [5] * 3)
    left = [weakref.ref(graph.recording) for graph in decoder.of(model).prompts.graphs()]
    assert len(left) == 1
    gemma4_compat.decode_fast(model, enabled=False)
    assert holders(left) == []


def test_one_new_token_each(models: Models) -> None:
    """No step keeps the memory of a cache: a prompt does, once it was read twice."""
    model = fast(models, None)
    same(model, [5] * 4, new=1)
    assert counts(model) in ((1, 2), (1, 3))  # before transformers 5.15 the model keeps its cache


@pytest.mark.parametrize("what", ["in place", "new parameter", "another module", "number", "class of a module"])
def test_a_change_is_noticed(models: Models, what: str) -> None:
    model = fast(models, None)
    before = answers(model, [5] * 3)[-1]
    calls.CHANGES[what](model)
    found = answers(model, [5] * 3)[-1]
    assert not found.logits[0].equal(before.logits[0])
    assert_equal(found, generate(model, text(model, 5, seed=2), EAGER))


def test_adapters_keep_their_graphs(models: Models) -> None:
    model = models.fresh(None, "language")
    model.load_adapter(models.workspace.adapter("language"), "second")
    model.eval()
    gemma4_compat.decode_fast(model, exact=True)
    for _ in range(3):
        for name in ("default", "second"):
            model.set_adapter(name)
            same(model, [5])
    assert counts(model)[1] == 4


def test_a_failed_capture_says_so_once_and_changes_nothing(
    models: Models, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gemma4_compat._lab.stand_ins import tape

    model = fast(models, None)

    def several_at_once(states: Any) -> None:
        if states.shape[1] > 1 and tape._under_way.locked():
            raise ValueError("not today")

    calls.failing(model, several_at_once)
    with caplog.at_level("WARNING", "gemma4_compat"):
        same(model, [5, 5, 5, 6, 6, 6])
    said = [record.getMessage() for record in caplog.records if "eagerly" in record.getMessage()]
    assert said == ["gemma4_compat: reading prompts eagerly: a capture of a prompt failed with ValueError: not today"]
    assert counts(model) == (0, 0)
    assert steps(model).replayed > 0


def test_few_graphs_are_kept_and_steps_keep_theirs(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "MAX_PROMPTS", 2)
    monkeypatch.setattr(captured_calls, "REMEMBERED", 6)
    model = fast(models, None)
    calls.sized(model, 48)
    for length in (3, 4, 5, 6):
        same(model, [length] * 3)
        assert len(list(decoder.of(model).prompts.graphs())) <= 2
    for length in range(10, 20):
        same(model, [length])
    decoding = decoder.of(model)
    (state,) = decoding._states.states
    assert len(state.calls[decoding.prompts].seen) == 6
    assert len(list(decoding.steps.graphs())) == 2  # windows that are full, and not
    assert steps(model).captured == 2


def test_graphs_go_where_memory_is_short(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fast(models, None)
    same(model, [5] * 3)
    monkeypatch.setattr(prompts, "has_room", lambda *_, **__: False)
    same(model, [5])
    assert counts(model) == (1, 3)  # what is there is replayed
    same(model, [6] * 3)
    assert counts(model) == (1, 3)
    assert not any(decoder.of(model).prompts.graphs())


@pytest.mark.parametrize("layer", [0, 3])
def test_a_prompt_that_runs_out_of_memory_gets_that_of_graphs(models: Models, layer: int) -> None:
    import torch

    model = fast(models, None)
    calls.sized(model, 48)
    wanting: list[int] = []

    def allocates(_states: Any) -> None:
        if wanting:
            wanting.pop()
            raise torch.OutOfMemoryError("CUDA out of memory")

    calls.failing(model, allocates, layer)
    same(model, [5] * 3)
    wanting.append(1)
    same(model, [9, 9, 9])
    assert not wanting
    assert counts(model)[0] == 2
    wanting += [1, 1, 1]  # the second time without the graphs of prompts, the third time without any
    with pytest.raises(torch.OutOfMemoryError):
        generate(model, text(model, 12))
    wanting[:] = [1]
    with pytest.raises(torch.OutOfMemoryError):  # no graph is left
        generate(model, text(model, 12))
    same(model, [12] * 3)


def test_long_prompts_are_not_captured(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MAX_TOKENS", 10)
    model = fast(models, None)
    same(model, [11] * 3)
    for seed in range(3):
        generate(model, text(model, 6, batch=2, seed=seed))
    assert counts(model) == (0, 0)
    same(model, [10] * 3)
    assert counts(model) == (1, 2)


@pytest.mark.parametrize("where", ["device", "streamed"])
def test_threads(models: Models, where: str) -> None:
    model = fast(models, None, None, where)

    def answer(seed: int, way: dict[str, Any]) -> Any:
        """With a cache of its own: before transformers 5.15 the one that ``generate`` makes is the model's."""
        return generate(model, text(model, 5, seed=seed), way, past_key_values=calls.static_cache(model, 32))

    expected = [answer(seed, EAGER) for seed in range(2)]

    def work(seed: int) -> None:
        for _ in range(4):
            assert_equal(answer(seed, {}), expected[seed])

    raised = threads.run_together([lambda seed=seed: work(seed) for seed in range(2)], limit=100)
    assert raised == [None, None]
    assert steps(model).reasons == ()
