"""Models on meta, their planned bytes and the bytes they hold, for the tests of the planner."""

from __future__ import annotations

import functools
from typing import Any

from gemma4_compat._engine import versions
from gemma4_compat._gemma4.models import build, variants
from gemma4_compat._gemma4.quantization.config import default_skip_modules, linear_names
from gemma4_compat._lab import tiny
from gemma4_compat._memory.blueprint import Blueprint, describe
from gemma4_compat._plan import plan as _plan

QUANTIZATIONS = [None, "4bit", "4bit-double", "8bit"]
HAS_UNIFIED = versions.admits(">=5.10", versions.installed("transformers") or "0")
VARIANTS = [name for name in variants.NAMES if name != "12B" or HAS_UNIFIED]


@functools.cache
def on_meta(variant: str) -> Any:
    return build.on_meta(variant)[0]


def planned(model: Any, quantization: str | None) -> Blueprint:
    names = linear_names(model, default_skip_modules(model)) if quantization else None
    return describe(model, quantization, names)


def whole(workspace: Any, quantization: str | None) -> Any:
    """The model on one device, towers quantized as in a plan, which `workspace.load` leaves out before 5.13."""
    return tiny.load(workspace.checkpoint, quantization, device=workspace.main, towers=True)


def stored(blueprint: Blueprint) -> int:
    return sum(block.stored.nbytes for block in blueprint.blocks)


def held(model: Any) -> int:
    """Bytes of every tensor of a model, members of quantization states included, each once."""
    import torch

    found: dict[int, int] = {}

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[id(value)] = value.numel() * value.element_size()

    for tensor in (*model.parameters(), *model.buffers()):
        add(tensor)
        add(getattr(tensor, "SCB", None))
        state = getattr(tensor, "quant_state", None)
        for part in (state, getattr(state, "state2", None)):
            for value in vars(part).values() if part is not None else ():
                add(value)
    return sum(found.values())


def run(plan: _plan.Plan) -> dict[str, Any]:
    """Execute a plan's code; the names it defines."""
    names: dict[str, Any] = {}
    exec(compile(plan.code, "plan", "exec"), names)
    return names
