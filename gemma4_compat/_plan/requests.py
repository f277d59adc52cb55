"""What a plan is asked for, and what is refused of it before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from gemma4_compat._engine import versions
from gemma4_compat._engine.io.text import parse_size
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._gemma4.models import build
from gemma4_compat._gemma4.quantization import config
from gemma4_compat._memory import blueprint, layout
from gemma4_compat._memory.formulas import Load
from gemma4_compat._plan import assistants, budgets

#: What a load takes from a request.
_OF_LOAD = ("context", "batch", "prompt", "prefill_chunk", "vision", "audio", "attention")


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What is planned: the arguments of :func:`plan_device_map`, and their defaults."""

    model: Any
    vram: float | str | Sequence[float | str] | Mapping[int | str, float | str] | None = None
    context: int = 8192
    batch: int = 1
    prompt: int | None = None
    prefill_chunk: int | None = None
    quantize: str | None = "4bit"
    quantize_experts: bool | None = None
    adapter: str | Path | None = None
    vision: bool = False
    audio: bool = False
    cpu: float | str | None = None
    disk: float | str | None = None
    attention: str = "sdpa"
    balanced: bool = False
    fast: bool = True
    assistant: bool = False
    bus: float | str | None = None
    card: str | None = None

    @property
    def load(self) -> Load:
        """What the model has to compute."""
        return Load(**{field: getattr(self, field) for field in _OF_LOAD})


def refuse(request: Request) -> None:
    """Refuse what cannot be planned, without torch and transformers.

    Raises:
        Gemma4CompatError: a model or an adapter is not there, a value is impossible, or two contradict each other.
    """
    for size in (request.cpu, request.disk, bus(request)):
        if size is not None:
            parse_size(size)
    if request.vram is not None or request.card is not None:
        layout.check(budgets.of(request.vram, request.card), request.load)
    else:
        layout.check({0: 1}, request.load)
    if request.prefill_chunk is not None and (request.vision or request.audio):
        raise Gemma4CompatError(
            f"prefill_chunk is {request.prefill_chunk!r} for inputs with images or audio: releases of transformers "
            "differ in whether they split such a prompt. Leave prefill_chunk out"
        )
    if request.assistant and request.batch != 1:
        raise Gemma4CompatError(
            f"assistant=True with batch={request.batch}: with an assistant, generate takes one prompt at a time. Use "
            "batch=1, or leave assistant out"
        )
    if request.assistant and not assistants.exist():
        raise Gemma4CompatError(
            f"assistant=True, but transformers {versions.installed('transformers')} has no assistants for Gemma 4. "
            "Install transformers 5.8 or newer, or leave assistant out"
        )
    if request.quantize not in (None, "none"):
        config.check(request.quantize, or_none=True)
    build.refuse_unknown(request.model)
    if request.adapter is not None:
        blueprint.adapter_sizes(request.adapter)


def bus(request: Request) -> float | str | None:
    """The bandwidth that was given, as a size."""
    return request.bus.removesuffix("/s") if isinstance(request.bus, str) else request.bus
