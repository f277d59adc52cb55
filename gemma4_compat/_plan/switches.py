"""What a training plan decides by itself, and why; and what it leaves to you."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from gemma4_compat._engine import dormant, settings
from gemma4_compat._engine.io.text import size_text
from gemma4_compat._gemma4.attention import windows
from gemma4_compat._memory import layout
from gemma4_compat._memory.blueprint import Blueprint
from gemma4_compat._memory.use import Use
from gemma4_compat._plan.training_step import Step, StepMemory
from gemma4_compat._training import loss as chunks_of
from gemma4_compat._training import mlp as mlp_of
from gemma4_compat._training.captured import layers
from gemma4_compat._training.parts import MARGIN

#: The model, its device as the map has it, and the bytes that may be allocated on it.
Place = tuple[Blueprint, int | str, int]
#: What a step takes without a switch and with it.
Memories = Mapping[bool, StepMemory]
#: The patches of switches that have one.
_PATCHES = {"chunked_loss": chunks_of.ID, "chunked_mlp": mlp_of.ID, "sliding_windows": windows.ID}


def chosen(
    place: Place, step: Step, free: Collection[str], measured: Callable[[Step], StepMemory]
) -> tuple[Step, dict[str, str]]:
    """The step with the switches that it needs, and why each is on or off.

    Args:
        place: the model and what there is for it.
        step: its settings, with these switches off.
        free: the switches to decide.
        measured: what a step takes.
    """
    reasons: dict[str, str] = {}
    # Windows save time, so they come before chunks, and once more after them: a step may need both.
    # Graphs take memory, so they come last.
    for switch in ("chunked_loss", "sliding_windows", "chunked_mlp", "sliding_windows", "train_fast"):
        if switch not in free or getattr(step, switch):
            continue
        never = unsupported_reason(step, switch)
        if never:
            reasons[switch] = never
            continue
        names, where = settings.enabled()
        if _PATCHES.get(switch) in names:
            step, reasons[switch] = turned(step, switch), f"{where} names {_PATCHES[switch]}"
            continue
        memories = {False: measured(step), True: measured(turned(step, switch))}
        if switch == "chunked_loss":
            on, reasons[switch] = loss(place, memories)
        elif switch == "chunked_mlp":
            on, reasons[switch] = mlp(place, memories)
        elif switch == "train_fast":
            on, reasons[switch] = replays(place, memories)
        else:
            last = "chunked_mlp" not in free or "chunked_mlp" in reasons
            on, reasons[switch] = by_windows(place, memories, last=last)
        step = turned(step, switch) if on else step
    if step.train_fast and (never := unsupported_reason(step, "train_fast") or capture_reason(measured(step))):
        step, reasons["train_fast"] = replace(step, train_fast=False), never
    return step, reasons


def turned(step: Step, switch: str) -> Step:
    """The step with a switch turned; the step itself where that changes nothing."""
    if not getattr(step, switch) and unsupported_reason(step, switch):
        return step
    changed: dict[str, Any] = {switch: not getattr(step, switch)}
    return replace(step, **changed)


def unsupported_reason(step: Step, switch: str) -> str:
    """Why a switch does nothing in this step, on a GPU; empty if it does something."""
    tokens = step.max_length * step.batch
    if switch == "chunked_mlp" and tokens <= mlp_of.TOKENS:
        return f"{tokens:,} tokens are one chunk"
    if switch == "sliding_windows" and step.max_length < windows.LEAST_ON_GPU:
        return f"not used on a GPU below {windows.LEAST_ON_GPU:,} tokens"
    if switch == "train_fast" and tokens > layers.MAX_TOKENS and not step.train_fast:
        return f"above {layers.MAX_TOKENS:,} tokens it gains less and takes more memory, so you have to ask for it"
    patch = _PATCHES.get(switch)
    return "" if patch is None or dormant.is_installed(patch) else f"the patch {patch} is off"


def loss(place: Place, memories: Memories) -> tuple[bool, str]:
    """Whether the loss is computed in chunks, and why."""
    streamed = _streamed(place, memories)
    why = _needed(streamed, memories)
    saved = size_text(memories[False].peak - memories[True].peak)
    return bool(why), why or f"the logits of all tokens fit; in chunks the step would take {saved} less"


def by_windows(place: Place, memories: Memories, *, last: bool) -> tuple[bool, str]:
    """Whether sliding layers are computed by windows, and why.

    ``last``: no other switch can still save memory.
    """
    saved = memories[False].peak - memories[True].peak
    streamed = _streamed(place, memories)
    why = _needed(streamed, memories) if saved > 0 and (streamed or last) else ""
    if why:
        return True, f"{why}; it also takes less time, with another rounding of gradients"
    less = f"{size_text(saved)} and time" if saved > 0 else "time"
    return False, f"it would save {less}, with another rounding of gradients, so you have to ask for it"


def _streamed(place: Place, memories: Memories) -> dict[bool, int]:
    """How many decoder layers are streamed, for those of the steps that fit."""
    cut, device, budget = place
    found, room = {}, budget - MARGIN
    for way, memory in memories.items():
        if room > 0 and layout.fits(cut, {device: room}, memory.load):
            found[way] = len(layout.layout(cut, {device: room}, memory.load).streamed)
    return found


def _needed(streamed: Mapping[bool, int], memories: Memories) -> str:
    """Why a step needs a switch that saves memory; empty if it does not."""
    saved = size_text(memories[False].peak - memories[True].peak)
    if False not in streamed:
        return f"otherwise the step takes {saved} more, and would not leave {size_text(MARGIN)} free"
    more = streamed[False] - streamed.get(True, streamed[False])
    return (
        f"otherwise the step takes {saved} more, and {more} more decoder layers would be streamed" if more > 0 else ""
    )


def mlp(place: Place, memories: Memories) -> tuple[bool, str]:
    """Whether MLPs are computed in chunks, and why.

    Layers are streamed first: a chunk costs a forward, a copy hides.
    """
    saved = size_text(memories[False].peak - memories[True].peak)
    cut, device, budget = place
    room = budget - MARGIN
    if room > 0 and layout.fits(cut, {device: room}, memories[False].load):
        return False, f"the intermediates of all tokens fit; in chunks the step would take {saved} less, and more time"
    return True, f"otherwise the step takes {saved} more, and would not leave {size_text(MARGIN)} free"


def replays(place: Place, memories: Memories) -> tuple[bool, str]:
    """Whether decoder layers are replayed, and why."""
    never = capture_reason(memories[True])
    if never:
        return False, never
    taken = f"their graphs take {size_text(memories[True].peak - memories[False].peak)}"
    streamed = _streamed(place, memories)
    if True not in streamed:
        return False, f"{taken}, and would not leave {size_text(MARGIN)} free"
    more = streamed[True] - streamed.get(False, 0)
    taken += f", and {more} more decoder layers are streamed" if more > 0 else ""
    return True, f"short steps are CPU-bound, and replays are not; {taken}, for sequences of one length"


def capture_reason(memory: StepMemory) -> str:
    """Why no decoder layer could be captured; empty if one was."""
    return "" if memory.graphs.captured else "; ".join(memory.graphs.reasons) or "no decoder layer is captured"


def others(step: Step) -> dict[str, str]:
    """Why the other switches are as they are."""
    found = {
        "gradient_checkpointing": "keeps one hidden state per layer and computes the rest again"
        if step.gradient_checkpointing
        else "you turned it off, so the activations of all layers are kept"
    }
    if step.gradient_checkpointing and step.activation_offloading:
        found["activation_offloading"] = "those hidden states are in host memory until the backward pass needs them"
    elif step.gradient_checkpointing:
        found["activation_offloading"] = "copies take time, so you have to ask for it"
    found["padding"] = (
        "masks of padded sequences are counted; --no-padding leaves them out"
        if step.padding
        else "masks of padded sequences are left out; --padding counts them"
    )
    return found


def warning(use: Use) -> str:
    """What to be warned of: less than :data:`MARGIN` is left; empty otherwise."""
    left = use.budget - use.peak
    if left >= MARGIN:
        return ""
    return (
        f"only {size_text(left)} of {size_text(use.budget)} are left in this step. Fragmentation and memory inside "
        f"kernels are not counted; below {size_text(MARGIN)}, memory may run out"
    )
