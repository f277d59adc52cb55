"""Decoding by replay on a GPU: every answer is that of the same call with ``disable_compile=True``, bit by bit."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._gemma4.accelerate import module_hooks
from tests.conftest import is_affected, patch
from tests.unit.generation.calls import (
    CHANGES,
    NEW,
    PATCH,
    SCENARIOS,
    Models,
    ask,
    compared,
    differ,
    failing,
    generate,
    layers,
    static_cache,
    steps,
    switched,
    text,
)
from tests.unit.generation.test_deferred_stop import answer, end_at, same
from tests.unit.generation.test_step_inputs import padded
from tests.unit.offload import threads

QUANTIZATIONS = (None, "4bit-double", "4bit")
PLACEMENTS = ("device", "host", "streamed")
#: Every quantization in every place; each of both with an adapter and without.
CELLS = [
    (quantization, (None, "language")[index % 2], where)
    for index, (quantization, where) in enumerate(itertools.product(QUANTIZATIONS, PLACEMENTS))
]


#: Whether ``decode_fast`` may use custom kernels; what they compute is in test_custom_kernels.py.
ARITHMETIC = [pytest.param(False, id="exact"), pytest.param(True, id="own")]


@pytest.fixture(autouse=True)
def fused_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of a few tokens have fused kernels, too."""
    from gemma4_compat._graphs import fused_steps

    monkeypatch.setattr(fused_steps.Progress, "after", 2)


@pytest.fixture(scope="module")
def models(workspace: Any) -> Models:
    return Models(workspace)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize(("quantization", "adapter", "where"), CELLS)
def test_the_same_answers(
    models: Models, quantization: str | None, adapter: str | None, where: str, scenario: str
) -> None:
    model = models(quantization, adapter, where)
    compared(model, SCENARIOS[scenario](model, models))


@pytest.mark.parametrize("own", ARITHMETIC)
@pytest.mark.parametrize("where", PLACEMENTS)
def test_the_second_call_of_a_kind_captures_nothing(models: Models, where: str, own: bool) -> None:
    model = models.fresh(where=where, own=own)
    options = {"min_new_tokens": NEW, "max_new_tokens": NEW, "cache_implementation": "static"}
    model.generate(**text(model), **options)
    before = steps(model)
    assert (before.eager, before.captured, before.replayed) == (1, 1, NEW - 2)
    for seed in (8, 9):
        model.generate(**text(model, seed=seed), **options)
    after = steps(model)
    assert (after.eager, after.captured, after.replayed) == (1, 1, 3 * (NEW - 1) - 1)
    assert after.reasons == ()


@pytest.mark.parametrize("quantization", [None, "4bit-double"])
def test_adapters_switched_disabled_and_merged_between_calls(models: Models, quantization: str | None) -> None:
    model = models.fresh(quantization, "language")
    model.load_adapter(models.workspace.adapter("all"), "second")
    switched(model)
    model.merge_adapter()
    compared(model, ask(model))
    model.unmerge_adapter()
    compared(model, ask(model))
    model.delete_adapter("second")
    compared(model, ask(model))


@pytest.mark.parametrize("quantization", [None, "4bit-double"])
@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_noticed_before_a_replay(models: Models, what: str, quantization: str | None) -> None:
    model = models.fresh(quantization)
    before = compared(model, ask(model))
    CHANGES[what](model)
    assert differ(before, compared(model, ask(model)))


def test_a_streamed_weight_changed_on_the_host_is_read_anew(models: Models) -> None:
    model = models.fresh(where="streamed")
    before = compared(model, ask(model))
    norm = layers(model)[1].input_layernorm
    with module_hooks.weights_brought_in(norm):
        norm.weight.data = norm.weight.data * -1.5
    assert differ(before, compared(model, ask(model)))


def test_another_attention_is_captured_anew(models: Models) -> None:
    model = models.fresh()
    compared(model, ask(model))
    captured = steps(model).captured
    model.set_attn_implementation("eager")
    compared(model, ask(model))
    assert steps(model).captured > captured


@pytest.mark.parametrize("where", PLACEMENTS)
def test_a_hook_of_the_user_runs_for_every_token(models: Models, where: str) -> None:
    model = models.fresh(where=where)
    compared(model, ask(model))
    seen: list[int] = []
    handle = layers(model)[1].register_forward_hook(lambda _module, _given, output: seen.append(1) or -output)
    changed = compared(model, ask(model), replays=False)
    assert len(seen) == 2 * NEW
    assert any("hook" in reason for reason in steps(model).reasons)
    handle.remove()
    assert differ(changed, compared(model, ask(model)))


def test_int8_says_why_it_is_not_replayed(models: Models) -> None:
    model = models.fresh("8bit")
    compared(model, ask(model), replays=False)
    (reason,) = steps(model).reasons
    assert "8-bit" in reason


def _synchronizes(states: Any) -> None:
    float(states.sum())


def _takes_all_memory(states: Any) -> None:
    import torch

    if torch.cuda.is_current_stream_capturing():
        torch.empty(1 << 50, dtype=torch.uint8, device=states.device)


@pytest.mark.parametrize("where", PLACEMENTS)
@pytest.mark.parametrize("fails", [_synchronizes, _takes_all_memory])
def test_a_capture_that_fails_leaves_everything_as_it_was(
    models: Models, where: str, fails: Callable[[Any], None]
) -> None:
    model = models.fresh(where=where)
    actions = failing(model, fails)
    failed = compared(model, ask(model), replays=False)
    (reason,) = steps(model).reasons
    assert "capture" in reason
    actions.clear()
    assert not differ(failed, ask(model)({"disable_compile": True}))
    compared(model, lambda way: [generate(model, text(model, batch=2), way)])  # another kind of step
    other = models.fresh(where=where)
    compared(other, ask(other))


@pytest.mark.parametrize("own", ARITHMETIC)
@pytest.mark.parametrize("where", PLACEMENTS)
def test_two_threads_at_once(models: Models, where: str, own: bool) -> None:
    """Each with a cache of its own: before transformers 5.15 the one that ``generate`` makes is the model's."""
    import torch

    model = models.fresh(where=where, own=own)
    wrong: list[int] = []

    def answer(index: int, way: dict[str, Any]) -> Any:
        cache = static_cache(model, 32)
        return generate(model, text(model, 12, seed=index), way, past_key_values=cache).sequences

    def work(index: int) -> None:
        wrong.extend(index for _ in range(4) if not torch.equal(answer(index, {}), expected[index]))

    plain: dict[str, Any] = {} if own else {"disable_compile": True}
    expected = [answer(index, plain) for index in range(2)]
    assert threads.run_together([lambda: work(0), lambda: work(1)], limit=60) == [None, None]
    assert wrong == []
    assert steps(model).replayed > 0


def test_other_streams_and_inference_mode_in_between(models: Models) -> None:
    import torch

    model = models.fresh()
    compared(model, ask(model))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        compared(model, ask(model))
    torch.cuda.current_stream().wait_stream(stream)
    with torch.inference_mode():
        compared(model, ask(model))
    compared(model, ask(model))


def test_without_the_patch_nothing_is_replayed(models: Models) -> None:
    model = models.fresh()
    try:
        gemma4_compat.revert(PATCH)
        compared(model, ask(model), replays=False)
    finally:
        gemma4_compat.install()
    compared(model, ask(model))


def allocated() -> int:
    import torch

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_allocated())


@pytest.mark.parametrize("own", ARITHMETIC)
@pytest.mark.parametrize("where", PLACEMENTS)
def test_nothing_is_left_of_a_deleted_model(models: Models, where: str, own: bool) -> None:
    left = []
    for _ in range(2):
        model = models.fresh(adapter="language", where=where, own=own)
        for batch in (1, 2):
            generate(model, text(model, batch=batch), {})
        assert steps(model).replayed > 0
        del model
        left.append(allocated())
    assert left[1] <= left[0]


@pytest.mark.parametrize("own", ARITHMETIC)
@pytest.mark.parametrize("where", PLACEMENTS)
def test_memory_is_flat_over_changing_calls(
    models: Models, record: Callable[[str, Any], None], where: str, own: bool
) -> None:
    model = models.fresh(adapter="language", where=where, own=own)
    model.load_adapter(models.workspace.adapter("all"), "second")
    held = []
    for _ in range(4):
        for name in ("default", "second"):
            model.set_adapter(name)
            for batch, length in ((1, 3), (3, 24), (2, 12)):
                generate(model, text(model, length, batch=batch), {})
        held.append(allocated())
    record(f"graph decoding, held {where}{', own kernels' if own else ''}", held)
    assert held[2] == held[3] <= held[1]
    assert steps(model).replayed > 0
    assert steps(model).reasons == ()


@pytest.mark.parametrize(("quantization", "adapter", "where"), CELLS)
def test_kernels_are_fused(models: Models, quantization: str | None, adapter: str | None, where: str) -> None:
    from gemma4_compat._graphs import fused_steps
    from gemma4_compat._kernels import kernels

    model = models.fresh(quantization, adapter, where)
    reason = fused_steps.unsupported_reason(model.device)
    if reason is not None:
        pytest.skip(reason)
    compared(model, ask(model, new=8))
    assert (steps(model).fused, steps(model).not_fused) == (1, ())
    assert kernels.of(model.device).inexact() == []


@pytest.mark.parametrize("sampled", [{}, {"do_sample": True, "top_k": 50}])
@pytest.mark.parametrize("where", PLACEMENTS)
def test_stops_that_are_read_late(
    models: Models, monkeypatch: pytest.MonkeyPatch, where: str, sampled: dict[str, Any]
) -> None:
    """The same tokens and the same random numbers after them, whether the text ends early or at its limit."""
    from gemma4_compat._graphs import deferred_stop

    if not is_affected(patch("transformers-deferred-stop")):
        pytest.skip("transformers before 5.17 has no deferred stop check")
    late = []
    defers = deferred_stop.Sampling.defers
    monkeypatch.setattr(deferred_stop.Sampling, "defers", lambda self: late.append(defers(self)) or late[-1])
    monkeypatch.setattr(deferred_stop, "WAITING", float("inf"))
    model = models(where=where)
    for batch in (1, 3):
        for end in (-1, end_at(model, 9, batch=batch, **sampled)):
            options = {"batch": batch, "eos_token_id": end, "pad_token_id": 0, **sampled}
            late.clear()
            found = answer(model, **options)
            assert sum(late) > 2
            assert same(found, answer(model, **options, disable_compile=True))


@pytest.mark.parametrize("length", [5, 24])
@pytest.mark.parametrize("where", PLACEMENTS)
def test_inputs_that_follow(models: Models, monkeypatch: pytest.MonkeyPatch, where: str, length: int) -> None:
    """Positions and masks are made on the GPU, while the windows become full and padding leaves them."""
    from gemma4_compat._generation import call

    if not is_affected(patch("transformers-deferred-stop")):
        pytest.skip("transformers before 5.17 builds the inputs of every token")
    followed: list[int] = []
    follow = call.Decoder.follow
    monkeypatch.setattr(call.Decoder, "follow", lambda self, ids: followed.append(1) or follow(self, ids))
    model = models(where=where)
    compared(model, lambda way: [generate(model, padded(model, left=True, length=length), way, new=24)])
    assert len(followed) > 12


def test_a_pool_outlives_its_graphs() -> None:
    """As after a step that could not be fused at once: PyTorch refuses the id of a pool whose graphs are all gone."""
    import torch

    from gemma4_compat._graphs.recording import CudaRecording

    device = torch.device("cuda", 0)
    pool, values = CudaRecording.new_pool(), torch.ones(4, device=device)
    for number in range(3):
        recording = CudaRecording(device, pool)
        found = recording.capture(lambda: values * 2)
        values.fill_(number)
        recording.replay()
        assert found.tolist() == [2 * number] * 4
        del recording, found
