"""What a process of graph_decoding.py does when it is told to: load, decode in one of the ways, compare the ways.

The ways: "eager" and "replayed" are the same ``generate`` call with a static cache, the first with upstream's own
switch ``disable_compile=True``; "compiled" is the second without the shim, where upstream compiles it; "plain" is
``generate`` with nothing said of a cache.
"""

from __future__ import annotations

import contextlib
import gc
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import Data, Order
from benchmarks.decoding import kernel_times as kernels
from benchmarks.decoding import models
from benchmarks.decoding.models import SECOND, text_prompt
from benchmarks.small_card import device as small_card_device
from benchmarks.small_card.measure import streamed_bytes
from benchmarks.small_card.models import PROMPT, Clock

WAYS: dict[str, Data] = {
    "eager": {"disable_compile": True},
    "replayed": {},
    "compiled": {},
    "plain": {"cache_implementation": None},
}
#: Those whose steps the shim counts.
COUNTED = ("eager", "replayed")
COUNTS = ("replayed", "captured", "fused", "eager", "capture_seconds")
#: Of each call in "bits", the tokens; a prompt is so much shorter than the window that half of them are past it.
BITS_TOKENS = 12

#: Tokens before a streamer is measured, and tokens in which it is.
STREAMED_TOKENS = 20, 300
#: Tokens of a call after its step was fused.
FUSED_TOKENS = 24

_model: Any = None


def generate(way: str, tokens: int, batch: Data, **options: Any) -> Any:
    """So many tokens after ``batch``, greedy unless ``options`` say otherwise, with a new static cache if none is
    given.
    """
    import torch

    given = {"do_sample": False, "min_new_tokens": tokens, "max_new_tokens": tokens, **options}
    if "past_key_values" not in given and models.base(_model).generation_config.cache_implementation is None:
        given["cache_implementation"] = "static"
    with torch.no_grad():
        return _model.generate(**batch, **{**given, **WAYS[way]})


def model() -> Any:
    """The one that was loaded."""
    return _model


def use(loaded: Any) -> None:
    """Measure a model that something else has loaded."""
    global _model
    _model = loaded


def logits(batch: Data) -> Any:
    """Those of every position of a prompt, as NumPy has them."""
    import torch

    with torch.no_grad():
        return _model(**batch, use_cache=False).logits[0].float().cpu().numpy()


def counted() -> Data:
    """Steps so far by how they ran, and what captures took."""
    from gemma4_compat._graphs import decoder

    found = decoder.statistics(models.base(_model))
    return {name: getattr(found, name) for name in COUNTS} | {"reasons": list(found.reasons)}


def since(before: Data) -> Data:
    now = counted()
    return {name: now[name] - before[name] for name in COUNTS} | {"reasons": now["reasons"]}


# Actions


def build(order: Order) -> Data:
    """The checkpoint and the adapters."""
    found = models.build(order["shape"], Path(order["folder"]))
    return found | {"cut_down": models.cut_down(order["shape"], Path(order["folder"]))}


def load(order: Order) -> Data:
    """Another model in place of the one before."""
    global _model
    _model = None
    small_card_device.forget_peak()
    started = time.perf_counter()
    _model = (models.upstream if order.get("upstream") else models.load)(order["where"], Path(order["folder"]))
    small_card_device.synchronize()
    return {"load_s": time.perf_counter() - started} | held(order)


def adapt(order: Order) -> Data:
    """A LoRA adapter on it."""
    global _model
    small_card_device.forget_peak()
    started = time.perf_counter()
    _model = models.adapt(_model, Path(order["folder"]))
    small_card_device.synchronize()
    return {"adapter_load_s": time.perf_counter() - started} | held(order)


def held(order: Order) -> Data:
    """What is on the card, what a token brings over the bus, and what was planned."""
    adapted = _model is not models.base(_model)
    placement = getattr(models.base(_model), "hf_device_map", None) or {"": small_card_device.main_device()}
    planned = models.planned_gib(
        order["where"], adapted, Path(order["folder"]), placement, PROMPT, max(order["tokens"].values())
    )
    nbytes = streamed_bytes(_model)
    return {"memory": small_card_device.memory(), "streamed_bytes": nbytes, "planned_gib": planned}


def decode_fast(order: Order) -> Data:
    """Have replay be used where upstream would compile, too."""
    import gemma4_compat

    gemma4_compat.decode_fast(_model)
    return {}


def turn(order: Order) -> Data:
    """Seconds to the first token and tokens a second after the first ``settled`` of them, of one call.

    With ``peak`` the caching allocator is emptied before it, and what it took is reported.
    """
    way, tokens, settled = order["way"], order["tokens"], order["settled"]
    if order.get("peak"):
        small_card_device.forget_peak()
    before = counted() if way in COUNTED else None
    batch, clock = text_prompt(_model, order.get("prompt", PROMPT)), Clock()
    small_card_device.synchronize()
    started = time.perf_counter()
    generate(way, tokens, batch, streamer=clock)
    small_card_device.synchronize()
    ended = time.perf_counter()
    times = clock.times[1:]  # the first is the prompt's
    found = {
        "seconds": ended - started,
        "first_token_s": times[0] - started,
        "tok_s": (len(times) - 1 - settled) / (times[-1] - times[settled]),
    }
    if order.get("peak"):
        found["memory"] = small_card_device.memory()
    return found | ({} if before is None else {"steps": since(before)})


def profiled(order: Order) -> Data:
    """The kernels of tokens that come after ``settled`` others."""
    batch = text_prompt(_model, order.get("prompt", PROMPT))

    def decode(start: Callable[[], None]) -> None:
        first = order["settled"] + 1  # of what a streamer gets; the prompt is the first
        generate(order["way"], first + kernels.TOKENS - 1, batch, streamer=Clock(at={first: start}))

    return kernels.recorded(decode)


def fusing(order: Order) -> Data:
    """Tokens a second of replays with fused kernels, or (``plain``) without, and what the captures of that took."""
    from gemma4_compat._graphs import decoder, fused_steps

    decoding = decoder.of(models.base(_model))
    tokens = fused_steps.Progress.after + FUSED_TOKENS
    before = counted()
    decoding.clear()
    decoding.fuses = not order["plain"]
    try:
        generate("replayed", tokens, text_prompt(_model, PROMPT))
        steps = since(before)
        found = turn(order | {"way": "replayed", "tokens": tokens, "settled": order["settled"]})
    finally:
        decoding.fuses = True
    return {"tok_s": found["tok_s"], "capture_s": steps["capture_seconds"], "fused": steps["fused"]}


def waiting(order: Order) -> Data:
    """Tokens a second of replays, and how many steps did not wait for the token before: none, with ``waits``."""
    from unittest import mock

    from gemma4_compat._graphs import deferred_stop

    cost = 0.0 if order["waits"] else deferred_stop.WAITING
    defers, late = deferred_stop.Sampling.defers, 0

    def counted(sampling: Any) -> bool:
        nonlocal late
        found = defers(sampling)
        late += found
        return found

    with (
        mock.patch.multiple(deferred_stop, WAITING=cost),
        mock.patch.object(deferred_stop.Sampling, "defers", counted),
    ):
        found = turn(order | {"way": "replayed"})
    return {"tok_s": found["tok_s"], "late": late}


class Nothing:
    """A user's streamer that does nothing."""

    def put(self, value: Any) -> None:
        """Take the tokens of a step."""

    def end(self) -> None:
        """The text is over."""


class _Letters:
    """A tokenizer for ``TextStreamer``, whose texts have a letter for each token."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "x" * len(tokens)


def streamed(order: Order) -> Data:
    """Milliseconds of a token with no ``streamer``, with a ``user``'s that does nothing, or with transformers' own.

    ``sampled``: with Gemma's own top-k and top-p.
    """
    import contextlib
    import io

    from transformers import TextStreamer

    kinds: Data = {"none": lambda: None, "user": Nothing, "transformers": lambda: TextStreamer(_Letters())}
    options = {"do_sample": True, "top_k": 64, "top_p": 0.95} if order["sampled"] else {}
    seconds = []
    for tokens in (STREAMED_TOKENS[0], sum(STREAMED_TOKENS)):
        batch = text_prompt(_model, PROMPT)
        small_card_device.synchronize()
        started = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            generate("replayed", tokens, batch, streamer=kinds[order["streamer"]](), **options)
        small_card_device.synchronize()
        seconds.append(time.perf_counter() - started)
    return {"ms": 1000 * (seconds[1] - seconds[0]) / STREAMED_TOKENS[1]}


def answer(order: Order) -> Data:
    """Seconds of an answer of so many tokens, prefill included."""
    batch = text_prompt(_model, PROMPT)
    small_card_device.synchronize()
    started = time.perf_counter()
    generate(order["way"], order["tokens"], batch)
    small_card_device.synchronize()
    return {"seconds": time.perf_counter() - started}


# Bits

KEPT = {"return_dict_in_generate": True, "output_logits": True}
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 50}


def _once(way: str, batch: Data, tokens: int = BITS_TOKENS, **options: Any) -> list[Any]:
    import torch

    torch.manual_seed(5)
    return [generate(way, tokens, batch, **KEPT, **options)]


def _window() -> int:
    return int(_model.config.get_text_config().sliding_window)


def _turns(way: str) -> list[Any]:
    """Three turns on one cache: each goes on from all that was said."""
    import torch
    from transformers import StaticCache

    text = _model.config.get_text_config(decoder=True)
    cache = StaticCache(config=text, max_cache_len=PROMPT + 3 * (BITS_TOKENS + 8))
    found: list[Any] = []
    ids = text_prompt(_model, PROMPT)["input_ids"]
    for number in range(3):
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        found += _once(way, batch, past_key_values=cache)
        said = text_prompt(_model, 8, seed=number)["input_ids"]
        ids = torch.cat([found[-1].sequences, said], dim=-1)
    return found


def _switched(way: str) -> list[Any]:
    """One adapter, another, the first again, none."""
    load_second_adapter()
    batch, found = text_prompt(_model, PROMPT), []
    for name in ("default", SECOND, "default", None):
        with using(name):
            found += _once(way, batch)
    _model.set_adapter("default")
    return found


def load_second_adapter() -> None:
    """Beside the first one, which stays active."""
    if SECOND not in _model.peft_config:
        _model.load_adapter(_folder / f"adapter-{SECOND}", SECOND)
        _model.eval()


@contextlib.contextmanager
def using(adapter: str | None) -> Iterator[None]:
    """Inside, that adapter is active, or none."""
    if adapter is not None:
        _model.set_adapter(adapter)
        yield
        return
    with _model.disable_adapter() if _model is not models.base(_model) else contextlib.nullcontext():
        yield


SCENARIOS: dict[str, Callable[[str], list[Any]]] = {
    "greedy": lambda way: _once(way, text_prompt(_model, PROMPT)),
    "sampled": lambda way: _once(way, text_prompt(_model, PROMPT), **SAMPLED),
    "several sampled": lambda way: _once(way, text_prompt(_model, PROMPT), num_return_sequences=3, **SAMPLED),
    "beams": lambda way: _once(way, text_prompt(_model, PROMPT), num_beams=3),
    "padded batch": lambda way: _once(way, text_prompt(_model, PROMPT, batch=2)),
    "image": lambda way: _once(way, models.image_prompt(_model)),
    "across the window": lambda way: _once(way, text_prompt(_model, max(2, _window() - BITS_TOKENS // 2))),
    "past the window": lambda way: _once(way, text_prompt(_model, _window() + 64)),
    "three turns": _turns,
    "adapter switched": _switched,
}

_folder = Path()


@contextlib.contextmanager
def fused_early() -> Iterator[None]:
    """Inside, a graph is fused at its second replay."""
    from gemma4_compat._graphs import fused_steps

    usual, fused_steps.Progress.after = fused_steps.Progress.after, 2
    try:
        yield
    finally:
        fused_steps.Progress.after = usual


def bits(order: Order) -> Data:
    """One of :data:`SCENARIOS` in both ways: whether the tokens are the same, and how far apart the logits are."""
    global _folder
    _folder = Path(order["folder"])
    outputs, seconds = {}, {}
    before = counted()
    for way in ("replayed", "eager"):
        small_card_device.synchronize()
        started = time.perf_counter()
        with fused_early():
            outputs[way] = SCENARIOS[order["scenario"]](way)
        small_card_device.synchronize()
        seconds[way] = time.perf_counter() - started
        if way == "replayed":
            steps = since(before)
    pairs = list(zip(outputs["eager"], outputs["replayed"], strict=True))
    return {
        "tokens_equal": all(_same(one.sequences, other.sequences) for one, other in pairs),
        "logits_differ_by": max(_apart(one.logits, other.logits) for one, other in pairs),
        "logits": sum(len(one.logits) for one, _ in pairs),
        "seconds": seconds,
        "steps": steps,
    }


def _same(one: Any, other: Any) -> bool:
    import torch

    return bool(torch.equal(one, other))


def _apart(one: Any, other: Any) -> float:
    """The largest difference; infinite where there are more of one, or a NaN."""
    if [step.shape for step in one] != [step.shape for step in other]:
        return float("inf")
    worst = 0.0
    for left, right in zip(one, other):
        if not _same(left, right):
            difference = float((left - right).abs().max())
            worst = max(worst, difference if difference == difference else float("inf"))
    return worst


# Endurance


def schedule(adapters: list[str | None], wanted: int, check_every: int) -> list[Data]:
    """Calls that give so many tokens: every batch size with every adapter, a short and a long prompt, in a new random
    order each time, so that each quarter of the calls has them all.
    """
    chance = random.Random(0)
    kinds = [
        {"batch": batch, "prompt": prompt, "adapter": adapter, "tokens": tokens}
        for batch in (1, 2, 3)
        for prompt, tokens in ((24, 96), (200, 32))
        for adapter in adapters
    ]
    found: list[Data] = []
    while wanted > 0:
        for kind in chance.sample(kinds, len(kinds)):
            if wanted > 0:
                found.append({"number": len(found), "check": len(found) % check_every == 0, **kind})
                wanted -= kind["batch"] * kind["tokens"]
    return found


def endure(order: Order) -> Data:
    """Some of these calls, sampled; after each what the card holds; of some the first tokens eagerly, too."""
    global _folder
    _folder = Path(order["folder"])
    if _model is not models.base(_model):
        load_second_adapter()
    before = counted()
    found = []
    for call in order["calls"]:
        with using(call["adapter"]):
            found.append(call | _endured(call))
    return {"calls": found, "steps": since(before)}


def _endured(call: Data) -> Data:
    import torch

    def said(way: str, tokens: int) -> Any:
        torch.manual_seed(call["number"])
        batch = text_prompt(_model, call["prompt"], batch=call["batch"], seed=call["number"])
        return generate(way, tokens, batch, **SAMPLED)[:, call["prompt"] :].cpu()

    tokens = said("replayed", call["tokens"])
    memory = small_card_device.memory()
    data: Data = {"resident_gib": memory["resident_gib"], "reserved_gib": reserved_gib(), "wrong": None}
    if call["check"]:
        few = min(BITS_TOKENS, call["tokens"])
        data["wrong"] = int((said("eager", few) != tokens[:, :few]).sum())
        data["compared"] = tokens[:, :few].numel()
    return data


def reserved_gib() -> float | None:
    import torch

    return torch.cuda.memory_reserved() / small_card_device.GIB if torch.cuda.is_available() else None


def free(_: Order) -> Data:
    """Let the model go; what is left on the card."""
    global _model
    _model = None
    gc.collect()
    small_card_device.forget_peak()
    return {"memory": small_card_device.memory()}


ACTIONS: dict[str, Callable[[Order], Data]] = {
    "build": build,
    "load": load,
    "adapt": adapt,
    "decode_fast": decode_fast,
    "turn": turn,
    "fusing": fusing,
    "waiting": waiting,
    "streamed": streamed,
    "answer": answer,
    "bits": bits,
    "endure": endure,
    "free": free,
}
