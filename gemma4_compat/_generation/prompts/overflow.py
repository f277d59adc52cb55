"""Prompts whose logits are not numbers because something overflowed in float16. Imports nothing upstream.

``generate`` makes tokens of them all the same. What counts is a row of the model's own logits, before any processor,
whose largest value is not finite: NaN or plus infinity anywhere in it, or minus infinity throughout. Minus infinity
beside numbers is no overflow.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from gemma4_compat._engine.io import notice
from gemma4_compat._gemma4.accelerate import attached
from gemma4_compat._gemma4.models import autocast, family
from gemma4_compat._gemma4.quantization import config as quantization

_WARNED = attached.OVERFLOW_WARNED
_running = threading.local()


class Reason(NamedTuple):
    """Why a model computes in float16, and what to do about it."""

    what: str
    to_do: str


class Watch:
    """What is known about the prompt of one ``generate``.

    Args:
        model: of transformers.
        reasons: why it computes in float16.
    """

    def __init__(self, model: Any, reasons: Sequence[Reason]) -> None:
        self.model, self._reasons = model, reasons
        self.overflowed: Any = None  # a bool on the device; None before the prompt was read

    def say(self) -> None:
        """Warn if the logits were not numbers. Waits for the device."""
        import torch

        if self.overflowed is None or _WARNED in vars(self.model) or not self.overflowed:
            return
        vars(self.model)[_WARNED] = True
        notice.warn_user(
            "the logits of this prompt are NaN or infinite, so the generated tokens mean nothing. "
            f"{type(self.model).__name__} computes in float16 ({', '.join(reason.what for reason in self._reasons)}), "
            f"and most likely an activation exceeded its largest number, {torch.finfo(torch.float16).max:,.0f}. "
            "Compute in bfloat16 where the GPU has it, or else in float32: "
            f"{', and '.join(reason.to_do for reason in self._reasons)} (docs/FLOAT16.md)."
        )


def reasons(model: Any) -> list[Reason]:
    """Why a Gemma 4 computes in float16; none if it does not, if it is another model, or if its user was told."""
    import torch

    if not family.is_gemma4_config(model.config) or _WARNED in vars(model):
        return []
    found = []
    if model.dtype == torch.float16:
        found.append(Reason("its weights", "pass dtype=torch.bfloat16 or torch.float32 to from_pretrained"))
    if autocast.dtype_on(model.device) == torch.float16:
        found.append(Reason("torch.autocast", "pass dtype=torch.bfloat16 to torch.autocast, or leave it out"))
    settings = quantization.stored_settings(model.config) or {}
    if settings.get("load_in_4bit") and str(settings.get("bnb_4bit_compute_dtype")).rpartition(".")[2] == "float16":
        found.append(Reason("its 4-bit layers", "pass that as bnb_4bit_compute_dtype to BitsAndBytesConfig"))
    if settings.get("load_in_8bit"):
        found.append(Reason("its 8-bit layers", "load in 4 bits, as layers in 8 bits have no other dtype"))
    return found


@contextlib.contextmanager
def watching(model: Any, found: Sequence[Reason]) -> Iterator[Watch]:
    """Inside, :func:`check` keeps what it sees of this model in this thread."""
    before = getattr(_running, "watch", None)
    _running.watch = Watch(model, found)
    try:
        yield _running.watch
    finally:
        _running.watch = before


def is_wanted(model: Any) -> bool:
    """Whether the logits of a prompt of this model, or of a view of it, are to be looked at."""
    running = getattr(_running, "watch", None)
    return running is not None and running.overflowed is None and running.model.config is model.config


def check(model: Any, outputs: Any, generation_config: Any, *, at: int = -1) -> None:
    """Check the logits after a prompt, if :func:`is_wanted`; they are at this place of ``outputs``.

    The device is waited for only where a token is drawn next: on a GPU that fails, and nothing can be read afterwards.
    """
    if not is_wanted(model) or outputs.logits is None:
        return
    running = _running.watch
    running.overflowed = ~outputs.logits[:, at].amax(dim=-1).isfinite().all()
    if generation_config.do_sample:
        running.say()
