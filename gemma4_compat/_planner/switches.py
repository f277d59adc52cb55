"""What a training plan decides by itself, and why; and what it leaves to you."""

from __future__ import annotations

from collections.abc import Mapping

from gemma4_compat._attention import windows
from gemma4_compat._common.text import size_text
from gemma4_compat._planner import layout
from gemma4_compat._planner.blueprint import Blueprint
from gemma4_compat._planner.memory import TrainingLoad
from gemma4_compat._planner.training_step import Step, StepMemory
from gemma4_compat._planner.use import TrainingUse
from gemma4_compat._training import mlp as pieces_of

#: Bytes that a step leaves free where it can: neither what kernels use internally nor fragmentation is counted.
MARGIN = 1 << 29


def loss(cut: Blueprint, device: int | str, budget: int, memories: Mapping[bool, StepMemory]) -> tuple[bool, str]:
    """Whether the loss is computed in chunks, and why.

    Args:
        cut: the model.
        device: as the map has it.
        budget: bytes that may be allocated on it.
        memories: of the step without chunks and with them.
    """
    streamed = {}
    for way, memory in memories.items():
        load = TrainingLoad(step=memory.peak)
        room = budget - MARGIN
        if room > 0 and layout.fits(cut, {device: room}, load):
            streamed[way] = len(layout.layout(cut, {device: room}, load).paged)
    saved = size_text(memories[False].peak - memories[True].peak)
    if False not in streamed:
        return True, f"otherwise the step takes {saved} more, and would not leave {size_text(MARGIN)} free"
    more = streamed[False] - streamed.get(True, streamed[False])
    if more > 0:
        return True, f"otherwise the step takes {saved} more, and {more} more decoder layers would be streamed"
    return False, f"the logits of all tokens fit; in chunks the step would take {saved} less"


def mlp(
    cut: Blueprint, device: int | str, budget: int, step: Step, memories: Mapping[bool, StepMemory]
) -> tuple[bool, str]:
    """Whether MLPs are computed in pieces, and why. Layers are streamed first: a piece costs a forward, a copy hides.

    Args:
        cut: the model.
        device: as the map has it.
        budget: bytes that may be allocated on it.
        step: its settings.
        memories: of the step without pieces and with them.
    """
    if step.max_length * step.batch <= pieces_of.TOKENS:
        return False, f"{step.max_length * step.batch:,} tokens are one piece"
    saved = size_text(memories[False].peak - memories[True].peak)
    room = budget - MARGIN
    if room > 0 and layout.fits(cut, {device: room}, TrainingLoad(step=memories[False].peak)):
        return False, f"the intermediates of all tokens fit; in pieces the step would take {saved} less, and more time"
    return True, f"otherwise the step takes {saved} more, and would not leave {size_text(MARGIN)} free"


def others(step: Step) -> dict[str, str]:
    """Why the other switches for long sequences are as they are."""
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
    if step.max_length >= windows.LEAST_ON_GPU:
        found["sliding_windows"] = (
            f"GEMMA4_COMPAT_ENABLE={windows.ID} computes sliding layers window by window: less time, with another "
            "rounding of gradients, so you have to ask for it"
        )
    else:
        found["sliding_windows"] = f"not used on a GPU below {windows.LEAST_ON_GPU:,} tokens"
    return found


def warning(use: TrainingUse) -> str:
    """What to be warned of: less than :data:`MARGIN` is left; empty otherwise."""
    left = use.budget - use.peak
    if left >= MARGIN:
        return ""
    return (
        f"only {size_text(left)} of {size_text(use.budget)} are left in this step. Fragmentation and memory inside "
        f"kernels are not counted; below {size_text(MARGIN)}, memory may run out"
    )
