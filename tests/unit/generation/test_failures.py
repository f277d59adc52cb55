"""A step that cannot be captured runs as ever, and leaves everything as it was."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")

from gemma4_compat._gemma4.accelerate import module_hooks
from gemma4_compat._graphs import decoder
from gemma4_compat._graphs import steps as step_calls
from gemma4_compat._lab.stand_ins import tape
from gemma4_compat._offload import model_lock
from gemma4_compat._offload.transfer import row_lookup, streaming
from tests.unit.generation.calls import (
    TABLE,
    WINDOW,
    Models,
    ask,
    assert_equal,
    compared,
    differ,
    failing,
    generate,
    static_cache,
    steps,
    text,
)
from tests.unit.offload import threads

EAGER = {"disable_compile": True}


def _item(states: Any) -> None:
    float(states.sum())


def _raises(_states: Any) -> None:
    if capturing():
        raise ValueError("not today,\nreally")


def _raises_from_another(_states: Any) -> None:
    if capturing():
        try:
            raise KeyError("first")
        except KeyError:
            raise ValueError("second") from None


def capturing() -> bool:
    return tape._under_way.locked()


@pytest.mark.parametrize(
    ("fails", "reason", "where"),
    [
        (_item, "RuntimeError: operation not permitted when stream is capturing", "streamed"),
        (_raises, "ValueError: not today, really", "device"),
        (_raises_from_another, "KeyError: 'first'", "device"),
    ],
)
def test_a_capture_that_fails(
    models: Models,
    tapes: Any,
    caplog: pytest.LogCaptureFixture,
    where: str,
    fails: Callable[[Any], None],
    reason: str,
) -> None:
    model = models.fresh(None, where=where)
    actions = failing(model, fails)
    with caplog.at_level(logging.WARNING, "gemma4_compat"):
        failed = [compared(model, ask(model), replays=False) for _ in range(2)]
    assert not differ(*failed)
    (found,) = steps(model).reasons
    assert found.startswith(f"a capture failed with {reason}")
    assert [record.getMessage() for record in caplog.records if "eagerly" in record.getMessage()] == [
        f"gemma4_compat: decoding eagerly: {found}"
    ]
    assert steps(model).captured == 0
    nothing_is_left(model)
    actions.clear()
    assert not differ(failed[0], ask(model)(EAGER))
    compared(model, lambda way: [generate(model, text(model, batch=2), way)])  # another kind of step


def nothing_is_left(model: Any) -> None:
    """Nothing on the device that belongs on the host, nobody in the model, no stream of the capture."""
    for streamer in streaming.streamers(model):
        assert streamer._cyclic == streamer._again
        for group in streamer.groups():
            assert not group.onloaded
            assert not group.on_device or group is streamer._prefetched
    lock = model_lock.of(model)
    assert lock is None or not lock.holders()
    assert not decoder.of(model).lock.holders()


@pytest.mark.parametrize(
    ("where", "length", "error"),
    [("device", 2, SystemExit), ("device", WINDOW + 3, KeyboardInterrupt), ("streamed", 2, KeyboardInterrupt)],
)
def test_an_interruption_goes_through_and_the_step_can_be_done_again(
    models: Models, tapes: Any, where: str, length: int, error: type[BaseException]
) -> None:
    import torch

    model = models.fresh(None, where=where)

    def interrupt(_states: Any) -> None:
        if capturing():
            raise error

    actions, cache, other = failing(model, interrupt), static_cache(model), static_cache(model)
    with pytest.raises(error):
        generate(model, text(model, length), past_key_values=cache)
    nothing_is_left(model)
    actions.clear()
    # The step is still to do: the prompt is in the cache, and the token of the first step.
    with torch.no_grad():
        tokens = model.generate(**text(model, length), past_key_values=other, max_new_tokens=2, do_sample=False)
        last = {"input_ids": tokens[:, -1:]}
        assert torch.equal(model(**last, past_key_values=cache).logits, model(**last, past_key_values=other).logits)
    for one, two in zip(cache.layers, other.layers, strict=True):
        assert vars(one).keys() == vars(two).keys()
        assert getattr(one, "cumulative_length_int", 0) == getattr(two, "cumulative_length_int", 0)
    assert steps(model).reasons == ()
    compared(model, ask(model))


@pytest.mark.parametrize("name", ["new_pool", "__init__"])
def test_a_recorder_that_fails(models: Models, tapes: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    import torch

    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory for that")

    monkeypatch.setattr(tapes, name, staticmethod(fails) if name == "new_pool" else fails)
    model = models.fresh(None)
    compared(model, ask(model), replays=False)
    (reason,) = steps(model).reasons
    assert "OutOfMemoryError: no memory for that" in reason
    nothing_is_left(model)


def test_a_replay_that_fails_is_an_error(models: Models, tapes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kernel that fails: nobody knows what it has done."""
    model = models.fresh(None)
    compared(model, ask(model))

    def fails(_self: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(tapes, "replay", fails)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            generate(model, text(model))
    nothing_is_left(model)
    compared(model, ask(model))


def test_the_eager_step_raises_what_it_raises(models: Models, tapes: Any) -> None:
    model = models.fresh(None, where="streamed")
    calls: list[int] = []

    def fails(_states: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("the second forward")

    actions = failing(model, fails)
    with pytest.raises(ValueError, match="the second forward"):
        generate(model, text(model))
    nothing_is_left(model)
    actions.clear()
    compared(model, ask(model))


def test_shapes_that_change_with_every_token(
    models: Models, tapes: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(step_calls, "REMEMBERED", 3)
    model = models.fresh(None)
    for number in range(6):
        assert_equal(*(ask(model, logits_to_keep=number)(way)[0] for way in ({}, EAGER)))
    assert steps(model).reasons == ("the shapes of the inputs change with every token",)


def test_weights_on_disk(models: Models, tapes: Any) -> None:
    model = threads.split(models.workspace, "disk")
    compared(model, ask(model), replays=False)
    (reason,) = steps(model).reasons
    assert "is on disk" in reason


def test_rows_that_the_host_gathers(models: Models, tapes: Any) -> None:
    model = models.fresh(None, where="host")
    generate(model, text(model), EAGER)
    lookup = row_lookup.known(module_hooks.offload_hook(model.get_submodule(TABLE)))
    assert lookup is not None
    lookup.weight = None  # as on a GPU whose host cannot pin more memory
    compared(model, ask(model), replays=False)
    (reason,) = steps(model).reasons
    assert reason == f"the rows of {TABLE} are gathered by the host, since its memory is not pinned"


def test_int8(models: Models, tapes: Any) -> None:
    model = models.fresh("8bit")
    compared(model, ask(model), replays=False)
    (reason,) = steps(model).reasons
    assert "8-bit" in reason
