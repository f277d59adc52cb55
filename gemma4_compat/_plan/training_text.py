"""A training plan as text: a bar, what the step takes, what each option would change, and the code."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gemma4_compat._common.text import size_text
from gemma4_compat._plan.text import ASCII, BLOCKS, map_lines

if TYPE_CHECKING:
    from gemma4_compat._plan.result import TrainingPlan

_PARTS = ("weights", "streaming buffers", "adapter and optimizer", "activations and gradients", "free")


def training_text(plan: TrainingPlan, *, width: int | None = None, blocks: bool = True) -> str:
    """The whole plan; lines of the report are at most ``width`` columns, by default the terminal's."""
    width = max(50, min(width or shutil.get_terminal_size().columns, 100))
    return "\n".join([*_report(plan, width, BLOCKS if blocks else ASCII), "", plan.code])


def _report(plan: TrainingPlan, width: int, cells: str) -> Iterator[str]:
    stored = {None: "bf16", "4bit": "4 bit", "4bit-double": "4 bit, double quantization"}[plan.quantization]
    stored += ", experts too" if plan.experts else ""
    checkpointing = "with" if plan.gradient_checkpointing else "without"
    yield from textwrap.wrap(
        f"Training {plan.model} ({plan.model_class}), {stored}: sequences of {plan.max_length} tokens, batch "
        f"{plan.batch}, LoRA of rank {plan.r} on {plan.trained:,} weights, {plan.optim}, {checkpointing} "
        f"checkpointing{', the loss in chunks' if plan.chunked_loss else ''}"
        f"{', MLPs in pieces' if plan.chunked_mlp else ''}"
        f"{', sliding layers by windows' if plan.sliding_windows else ''}"
        f"{', decoder layers replayed' if plan.train_fast else ''}",
        width,
    )
    if plan.assumed:
        yield from textwrap.wrap(f"Assumed: {plan.assumed}.", width)
    yield ""
    yield from _bar(plan, width, cells)
    yield ""
    yield from map_lines(plan.device_map, width)
    if plan.streamed:
        yield from textwrap.wrap(
            f"{len(plan.streamed)} decoder layers are streamed: copied to the accelerator in the forward and again in "
            "the backward pass.",
            width,
        )
    yield ""
    yield f"Expected peak: {size_text(plan.peak)} in a step, {size_text(plan.loading)} while loading."
    for name, nbytes in (
        ("base weights", plan.weights),
        ("streaming buffers", plan.buffers),
        ("adapter", plan.adapter),
        (f"states of {plan.optim}", plan.optimizer_states),
        ("activations, loss and gradients", plan.activations),
        *([("graphs of train_fast", plan.graphs)] if plan.train_fast else []),
    ):
        yield f"  {name:<33}{size_text(nbytes):>11}"
    if plan.warning:
        yield from textwrap.wrap(f"Warning: {plan.warning}.", width)
    yield "Switches:"
    for name, reason in plan.reasons.items():
        on = getattr(plan, name, None)
        state = "" if on is None else "on: " if on else "off: "
        yield from textwrap.wrap(
            f"{name.replace('_', ' ')}: {state}{reason}.", width, initial_indent="  ", subsequent_indent="    "
        )
    yield "What an option would change:"
    for option, nbytes in plan.changes.items():
        yield f"  {option:<33}{'-' if nbytes < 0 else '+'}{size_text(abs(nbytes)):>10}"


def _bar(plan: TrainingPlan, width: int, cells: str) -> Iterator[str]:
    room = width - len("gpu 0  []  10.00 GiB of 10.00 GiB")
    bar, done = "", 0
    parts = (plan.weights, plan.buffers, plan.adapter + plan.optimizer_states, plan.activations + plan.graphs)
    for cell, nbytes in zip(cells, parts):
        done += nbytes
        bar += cell * (round(room * done / plan.budget) - len(bar))
    yield f"gpu 0  [{bar[:room].ljust(room, cells[-1])}]  {size_text(plan.peak)} of {size_text(plan.budget)}"
    if plan.cpu:
        yield f"cpu    {size_text(plan.cpu)}"
    yield from textwrap.wrap("  ".join(f"{cell} {part}" for cell, part in zip(cells, _PARTS)), width)
