"""What a process of prompts.py does when it is told to: place a model, read prompts in one of the ways."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import Data, Order
from benchmarks.decoding import measure, models
from benchmarks.experts import models as experts_models
from benchmarks.small_card import device as small_card_device

#: By name: what ``decode_fast`` is given (None: it is not called), and whether prompts are read in chunks. "upstream"
#: and "default" are the same call, without the shim and with it.
WAYS: dict[str, tuple[Data | None, bool]] = {
    "upstream": (None, False),
    "default": (None, False),
    "at_once": ({}, False),
    "any_length": ({"any_length": True}, False),
    "chunks": ({}, True),
}

#: Where weights are: those of experts in host memory, everything else on the card.
EXPERTS = "experts"

_weights: dict[str, Any] = {}
_hosted: Any = None
_decodings: dict[str, Any] = {}  # by way: what the model keeps for it
_loaded_gib: float | None = None  # on the card before the first prompt


def build(order: Order) -> Data:
    """The weights in memory."""
    global _hosted
    if order["where"] != EXPERTS:
        return models.build(order["shape"], Path(order["folder"]), _weights)
    started = time.perf_counter()
    _hosted = experts_models.hosted_experts(order["shape"])
    return {"build_s": time.perf_counter() - started, "machine": small_card_device.machine()}


def load(order: Order) -> Data:
    """The model, with what was built."""
    global _loaded_gib
    started = time.perf_counter()
    if order["where"] == EXPERTS:
        measure.use(experts_models.placed(order["shape"], _hosted, EXPERTS))
    else:
        loader = models.upstream if order["upstream"] else models.load
        measure.use(loader(order["where"], Path(order["folder"]), _weights))
    _weights.clear()  # a card has no room for both of the larger ones
    small_card_device.forget_peak()
    memory = small_card_device.memory()
    _loaded_gib = memory["resident_gib"]
    return {"load_s": time.perf_counter() - started, "memory": memory}


@contextlib.contextmanager
def using(way: str) -> Any:
    """Inside, prompts are read in that way. Each keeps its graphs and its cache."""
    fast, _ = WAYS[way]
    if way == "upstream":
        yield None
        return
    import gemma4_compat
    from gemma4_compat._graphs import decoder

    model = measure.model()
    vars(model).pop(decoder._ATTRIBUTE, None)
    if way not in _decodings:
        if fast is not None:
            gemma4_compat.decode_fast(model, **fast)
        _decodings[way] = decoder.of(model)
    vars(model)[decoder._ATTRIBUTE] = _decodings[way]
    yield _decodings[way]


def knows(order: Order) -> Data:
    """Whether this version has what a way asks ``decode_fast`` for."""
    import gemma4_compat

    asked = WAYS[order["way"]][0] or {}
    return {"known": asked.keys() <= inspect.signature(gemma4_compat.decode_fast).parameters.keys()}


def read(order: Order) -> Data:
    """Milliseconds from ``generate`` to the first token of a prompt that was not read before.

    ``new`` decodes so many tokens, and their time is in it. With ``peak``, the caching allocator is emptied before it,
    and what is taken above the loaded model is returned.
    """
    import torch

    way = order["way"]
    options = {"prefill_chunk_size": order["chunk"]} if WAYS[way][1] else {}
    batch = models.text_prompt(measure.model(), order["prompt"], seed=order["seed"])
    with using(way) as decoding, torch.no_grad():
        if order.get("peak"):
            small_card_device.forget_peak()
        before = _counted(decoding)
        small_card_device.synchronize()
        started = time.perf_counter()
        new = order.get("new", 1)
        measure.model().generate(**batch, do_sample=False, min_new_tokens=new, max_new_tokens=new, **options)
        small_card_device.synchronize()
        found: Data = {"ms": 1000 * (time.perf_counter() - started)}
        found |= {name: value - before[name] for name, value in _counted(decoding).items()}
    if decoding is not None:
        found["reasons"] = list(decoding.statistics.reasons)
    peak = small_card_device.memory()["peak_gib"] if order.get("peak") else None
    if peak is not None and _loaded_gib is not None:
        found["peak_gib_above_loaded"] = peak - _loaded_gib
    return found


def _counted(decoding: Any) -> Data:
    names = ("prompts_replayed", "prompts_captured")
    return {} if decoding is None else {name: getattr(decoding.statistics, name) for name in names}


ACTIONS: dict[str, Callable[[Order], Data]] = {"build": build, "load": load, "knows": knows, "read": read}
