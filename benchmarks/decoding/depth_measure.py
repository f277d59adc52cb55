"""What a process of depth.py does when it is told to: build a model in memory, place it, decode deep in a text.

A text of 32,768 tokens is not read for each turn. ``generate`` reads its first 64 tokens; then the static cache that
``generate`` made gets random keys and values, and says that it holds the whole text. Shapes, masks, positions and the
number of valid keys of each later step are those of a text that was read, and everything else is the usual call: the
cache is ``generate``'s own (with one of the user's, the host waits for every token).
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.common import Data, Order
from benchmarks.decoding import measure, models
from benchmarks.small_card import device as small_card_device
from benchmarks.small_card.measure import streamed_bytes
from benchmarks.small_card.models import PROMPT, Clock

#: Of a call that only captures.
WARM = 6
#: Tokens of a first call after the one that is fused.
FIRST = 8

_weights: dict[str, Any] | None = None
_decodings: dict[str, Any] = {}  # by way: what the model keeps for it
_unread = False
_skipping: set[Any] = set()


# Ways


#: The release before fused pointwise operations only.
WAYS = ("before", "exact", "own")


@contextlib.contextmanager
def using(way: str) -> Iterator[Any]:
    """Inside, steps run in that way. Each way keeps its graphs and its cache, so that turns do not capture again."""
    import gemma4_compat
    from gemma4_compat._graphs import decoder
    from gemma4_compat._kernels.match import fusing

    base = models.base(measure.model())
    if way not in _decodings:
        vars(base).pop(decoder._ATTRIBUTE, None)
        if way == "own":
            gemma4_compat.decode_fast(base)
        _decodings[way] = decoder.of(base)
    vars(base)[decoder._ATTRIBUTE] = _decodings[way]
    with mock.patch.object(fusing, "KINDS", frozenset()) if way == "before" else contextlib.nullcontext():
        yield _decodings[way]


@contextlib.contextmanager
def filled(context: int) -> Iterator[None]:
    """Inside, ``generate`` reads the first tokens of a prompt of so many, and goes on as if it had read them all."""
    global _unread
    _unread = context > PROMPT
    try:
        yield
    finally:
        _unread = False


def skip_what_is_unread(kind: Any) -> None:
    """Make :func:`filled` possible, once for a class: a replay that finds its class changed is captured anew."""
    if kind in _skipping:
        return
    _skipping.add(kind)
    read = kind._prefill

    @functools.wraps(read)
    def prefill(self: Any, input_ids: Any, generation_config: Any, model_kwargs: Data, **more: Any) -> Any:
        if not _unread:
            return read(self, input_ids, generation_config, model_kwargs, **more)
        context = input_ids.shape[1]
        given = {name: _first(value, context) for name, value in model_kwargs.items()}
        outputs = read(self, input_ids[:, :PROMPT], generation_config, given, **more)
        fill(_cache(outputs, given), context)
        return outputs

    kind._prefill = prefill


def _first(value: Any, context: int) -> Any:
    """What belongs to the tokens that are read."""
    return value[..., :PROMPT] if getattr(value, "shape", ())[-1:] == (context,) else value


def _cache(outputs: Any, given: Data) -> Any:
    from gemma4_compat._gemma4.cache import cache_names

    found = cache_names.cache_in(outputs)
    return cache_names.cache_in(given) if found is None else found


def fill(cache: Any, context: int) -> None:
    """Have a static cache hold a text of so many tokens: random keys and values."""
    for layer in cache.layers:
        if layer.keys is None:  # it shares another layer's
            continue
        layer.keys.normal_()
        layer.values.normal_()
        if hasattr(layer, "cumulative_length_int"):
            layer.cumulative_length_int = context
            if context > layer.max_cache_len:
                continue  # a prompt that is longer than the window leaves the tensor as it is
        layer.cumulative_length.fill_(context)


def room(order: Order) -> None:
    """Forget the longest call so far: transformers makes a static cache as long as that one, or as it is told here."""
    vars(models.base(measure.model()))["_previous_max_cache_length"] = order["allocated"]


# Actions


def build(order: Order) -> Data:
    """The weights in memory, and the adapters; with ``saved`` a checkpoint."""
    global _weights
    _weights = None if order["saved"] else {}
    folder = Path(order["folder"])
    found = models.build(order["shape"], folder, _weights)
    return found | {
        "cut_down": models.cut_down(order["shape"], folder),
    }


def load(order: Order) -> Data:
    """A model in place of the one before; in a new process the weights are built first."""
    if _weights is None and not order["saved"]:
        build(order)
    measure.free(order)
    _decodings.clear()
    started = time.perf_counter()
    measure.use(models.load(order["where"], Path(order["folder"]), _weights))
    small_card_device.synchronize()
    model = measure.model()
    skip_what_is_unread(type(model))
    return {
        "load_s": time.perf_counter() - started,
        "memory": small_card_device.memory(),
        "streamed_bytes": streamed_bytes(model),
    }


def adapt(order: Order) -> Data:
    """A LoRA adapter on it."""
    started = time.perf_counter()
    measure.use(models.adapt(measure.model(), Path(order["folder"])))
    _decodings.clear()
    small_card_device.synchronize()
    return {"adapter_load_s": time.perf_counter() - started}


class _UntilFused(Clock):
    """Notes when the first token came after the step was fused."""

    __module__ = Clock.__module__
    fused: float | None = None

    def __init__(self, decoding: Any) -> None:
        super().__init__()
        self.decoding = decoding

    def put(self, value: Any) -> None:
        super().put(value)
        if self.fused is None and self.decoding.statistics.fused:
            self.fused = self.times[-1]


def first(order: Order) -> Data:
    """What a call takes for which nothing is captured: in a process that has compiled nothing, or (later) has."""
    from gemma4_compat._graphs import fused_steps

    room(order)
    _decodings.pop(order["arithmetic"], None)
    with using(order["arithmetic"]) as decoding:
        clock = _UntilFused(decoding)
        batch = models.text_prompt(measure.model(), PROMPT)
        small_card_device.synchronize()
        started = time.perf_counter()
        measure.generate("replayed", fused_steps.Progress.after + FIRST, batch, streamer=clock)
        small_card_device.synchronize()
        return {
            "seconds": time.perf_counter() - started,
            "first_token_s": clock.times[1] - started,
            "fused_s": None if clock.fused is None else clock.fused - started,
            "capture_s": decoding.statistics.capture_seconds,
            "not_fused": list(decoding.statistics.not_fused),
        }


def warm(order: Order) -> Data:
    """Capture and fuse the step of this context, in a call that ends after a few tokens."""
    import torch

    def enough(ids: Any, _scores: Any, **_more: Any) -> Any:
        return torch.full(ids.shape[:1], ids.shape[1] >= order["prompt"] + WARM, device=ids.device)

    room(order)
    with using(order["arithmetic"]) as decoding, filled(order["prompt"]), measure.fused_early():
        before = measure.counted()
        batch = models.text_prompt(measure.model(), order["prompt"])
        measure.generate("replayed", order["tokens"], batch, stopping_criteria=[enough])
        return {"steps": measure.since(before), "not_fused": list(decoding.statistics.not_fused)}


def turn(order: Order) -> Data:
    """Tokens a second after a text of so many tokens; with ``read`` it is read."""
    room(order)
    fills = contextlib.nullcontext() if order.get("read") else filled(order["prompt"])
    with using(order["arithmetic"]), fills, measure.fused_early():
        found = measure.turn(order)
    return {"tok_s": found["tok_s"], "captured": found["steps"]["captured"], "replayed": found["steps"]["replayed"]}


def profiled(order: Order) -> Data:
    """The kernels of the last tokens of such a turn."""
    from benchmarks.decoding import kernel_times

    settled = order["tokens"] - kernel_times.TOKENS
    room(order)
    with using(order["arithmetic"]), filled(order["prompt"]), measure.fused_early():
        return measure.profiled(order | {"settled": settled})


ACTIONS: dict[str, Callable[[Order], Data]] = {
    "build": build,
    "load": load,
    "adapt": adapt,
    "first": first,
    "warm": warm,
    "turn": turn,
    "profile": profiled,
}
