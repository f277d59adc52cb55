"""What the graphs of prompts keep: only where a forward without one fits beside them, and nothing after a failure."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")

import gemma4_compat
from gemma4_compat._gemma4 import host
from gemma4_compat._generation.prompts import prompts
from gemma4_compat._graphs import decoder
from tests.unit.generation import calls
from tests.unit.generation.calls import Models, generate, steps, text

pytestmark = pytest.mark.usefixtures("tapes")
LONG = 4096


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Have the device say how many bytes are left."""
    return lambda nbytes: monkeypatch.setattr(host, "free_memory", lambda _device, _kept=0: nbytes)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def needed(model: Any, tokens: int, length: int, *, masks: bool = True) -> int:
    """Bytes that have to be free for a graph of such a forward, or beside graphs."""
    cache = calls.static_cache(model, length)
    return 2 * prompts.activations(calls.base(model), 1, tokens, cache, masks=masks, copies=True)


def kept(model: Any) -> int:
    return len(list(decoder.of(calls.base(model)).prompts.graphs()))


def read(model: Any, size: int, length: int) -> None:
    """A text in chunks of this size, in a cache of this length."""
    options: dict[str, Any] = {"past_key_values": calls.static_cache(model, length), "prefill_chunk_size": size}
    generate(model, text(model, 40), **options, new=2)


@pytest.mark.parametrize("room", [True, False])
def test_masks_of_a_long_cache_count_before_a_graph_is_made(
    models: Models, free: Callable[[int], None], room: bool
) -> None:
    model = gemma4_compat.decode_fast(models.fresh(None), exact=True)
    free(needed(model, 8, LONG) - (not room))
    read(model, 8, LONG)
    assert bool(kept(model)) is room


def test_graphs_go_before_chunks_of_another_size_need_their_memory(
    models: Models, free: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before their masks are made; chunks of the same size are replayed."""
    model = gemma4_compat.decode_fast(models.fresh(None), exact=True)
    free(needed(model, 8, LONG))
    read(model, 8, LONG)
    captured = steps(model).prompts_captured
    assert kept(model) == captured > 0
    inner, seen = calls.base(model), []
    prepare = inner.prepare_inputs_for_generation

    def prepared(*args: Any, **kwargs: Any) -> Any:
        seen.append(kept(model))
        return prepare(*args, **kwargs)

    monkeypatch.setattr(inner, "prepare_inputs_for_generation", prepared)
    free(needed(model, 8, LONG) - 1)
    assert needed(model, 8, LONG) < needed(model, 16, LONG)
    read(model, 16, LONG)
    assert seen[0] == kept(model) == 0


def test_a_failed_capture_keeps_nothing(models: Models) -> None:
    """Neither the inputs that were copied for it nor what the forward had, before Python collects garbage."""
    from gemma4_compat._lab.stand_ins import tape

    model = gemma4_compat.decode_fast(models.fresh(None), exact=True)
    alive: list[Any] = []

    def fails(states: Any) -> None:
        if states.shape[1] > 1 and tape._under_way.locked():
            alive.append(weakref.ref(states))
            raise RuntimeError("CUDA out of memory")

    calls.failing(model, fails)
    with uncollected():
        for seed in range(3):
            generate(model, text(model, 9, seed=seed))
        assert len(alive) == 1
        assert alive[0]() is None
    assert steps(model).prompts_captured == 0


def test_pieces_are_as_large_as_a_cache_leaves_room_for(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short text that came first does not decide for a long one."""
    from gemma4_compat._generation.prompts import buckets

    monkeypatch.setattr(buckets, "SMALL", 4)
    monkeypatch.setattr(buckets, "UNIT", 64)
    model = gemma4_compat.decode_fast(models.fresh(None), any_length=True)
    left = needed(model, 64, 64)
    monkeypatch.setattr(host, "free_memory", lambda _device, _kept=0: left)
    for length in (30, 200):
        generate(model, text(model, length))
    short, long = decoder.of(calls.base(model)).largest_buckets.items()
    assert short[0][0] == long[0][0] == 1
    assert short[0][1] < long[0][1]
    assert short[1] > long[1]
