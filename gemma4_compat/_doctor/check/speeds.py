"""Tokens a second, seconds to the first token, and peaks of memory."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from typing import Any

from gemma4_compat._doctor.check import prompts
from gemma4_compat._gemma4.models import random_inputs

#: Gaps between tokens that count, the last ones: before them a graph is captured, and after 96 replays fused.
_GAPS = 24


class Clock:
    """A streamer that notes when each token came; ``generate`` has copied it to the CPU, so the GPU is done."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _value: Any) -> None:
        """The prompt first, then one token a call."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to do."""


def of(model: Any, length: int, new: int, **options: Any) -> dict[str, Any]:
    """``tokens_s`` after a prompt of ``length`` tokens, and ``first_token_s``, of the second of two equal calls."""
    import torch

    batch = random_inputs.on(model, {"input_ids": prompts.random_ids(model.config, length, seed=length)})
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    for _ in range(2):
        clock = Clock()
        started = time.perf_counter()
        with torch.no_grad():
            model.generate(**batch, max_new_tokens=new, min_new_tokens=new, do_sample=False, streamer=clock, **options)
    times = clock.times[1:]  # the first is the prompt's
    gaps = [after - before for before, after in itertools.pairwise(times)][-_GAPS:]
    return {"tokens_s": round(1 / statistics.median(gaps), 2), "first_token_s": round(times[0] - started, 4)}


def forget_peak() -> None:
    """Begin a new measurement of the peak, without what is no longer needed."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak() -> int | None:
    """Bytes that PyTorch allocated at most on the GPU since :func:`forget_peak`; None without one."""
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
