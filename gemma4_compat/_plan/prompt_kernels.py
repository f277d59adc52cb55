"""Whether a plan counts attention of prompts as this package's kernels compute it, or as PyTorch does, with copies.

After ``decode_fast`` kernels of this package compute it (``_kernels.match.reading``), without the copies that PyTorch
makes of keys and values for each query head and of masks. A plan counts on that only where it is known to happen, and
where peaks were measured: in chunks. A prompt that is read at once has other peaks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gemma4_compat._engine import dormant, versions
from gemma4_compat._gemma4 import host
from gemma4_compat._gemma4.attention import windows
from gemma4_compat._kernels.specs import flash
from gemma4_compat._memory import formulas, layout
from gemma4_compat._memory.blueprint import Blueprint
from gemma4_compat._memory.formulas import Load
from gemma4_compat._memory.layout import Layout
from gemma4_compat._plan import assistants, speed

#: The least compute capability with these kernels.
LEAST = (8, 0)
#: What :func:`unsupported_reason` says if the card is all that is missing.
UNKNOWN = "nothing says which compute capability the card has"
#: What a refusal adds where a known card would help.
NAME_A_CARD = (
    "It fits a card with this memory and compute capability 8.0 or newer, where decode_fast reads prompts without "
    "copies of keys and values: name the card as well (--card 'RTX 3060')."
)
_Capability = tuple[int, int]


def capability(vram: Any, card: str | None) -> _Capability | None:
    """The compute capability of what is planned for; None if it is not known: ``vram`` alone may be any card's.

    Args:
        vram: as for :func:`gemma4_compat.plan_device_map`.
        card: as for it. Without both, the least capable of this machine's GPUs counts.

    Raises:
        Gemma4CompatError: ``card`` cannot be understood.
    """
    if card is not None:
        return speed.card(card).capability
    if vram is not None:
        return None
    import torch

    found = [host.capability(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    return min((one for one in found if one is not None), default=None)


def unsupported_reason(blueprint: Blueprint, load: Load, found: _Capability | None) -> str:
    """Why PyTorch's attention is counted for prompts of a load with fast decoding; empty if it is this package's.

    Args:
        blueprint: of the model.
        load: what it has to compute.
        found: the card's compute capability; None: not known.
    """
    import torch

    if load.attention != "sdpa":
        return f"the model is loaded with {load.attention} attention"
    if load.assistant and assistants.unsupported_reason(blueprint):
        return "with its assistant, transformers reads the prompt into another cache"
    attentions = (block.attention for block in blueprint.layers if block.attention is not None)
    if not all(flash.serves(one.heads, one.kv_heads, one.head_dim) for one in attentions):
        return "this package has no kernels for the model's heads"
    if not dormant.is_installed(windows.ID):
        return f"the patch {windows.ID} is off"
    if found is None:
        return "this package's kernels need CUDA" if torch.version.hip is not None else UNKNOWN
    if found < LEAST:
        return f"this package's kernels need compute capability {_text(LEAST)}, and the card has {_text(found)}"
    return ""


def reads_best_words(found: _Capability | None) -> bool:
    """Whether fast decoding is known to read a copy of the head in 8 bits on a card with this compute capability."""
    current = versions.current("transformers") or ""
    return found is not None and found >= LEAST and versions.admits(">=5.17", current)


def fits(blueprint: Blueprint, budgets: Mapping[int | str, int], load: Load, chunk: int) -> bool:
    """Whether a load fits with fast decoding and this package's attention.

    Args:
        blueprint: of the model.
        budgets: bytes by accelerator.
        load: what it has to compute.
        chunk: tokens in which a text is read whose chunks nobody asked for.

    Raises:
        Gemma4CompatError: a budget or the load cannot be understood.
    """
    if not (load.prefill_chunk or load.vision or load.audio):
        load = replace(load, prefill_chunk=chunk)
    return layout.fits(blueprint, budgets, replace(load, fast=True, own_in_chunks=True))


def copies(blueprint: Blueprint, placed: Layout, load: Load, why: str) -> str:
    """Why PyTorch's copies count in the peaks of a placement; empty if they do not, or make no difference.

    Args:
        blueprint: of the model.
        placed: the placement.
        load: that it was made for.
        why: from :func:`unsupported_reason`.
    """
    own = replace(load, own_in_chunks=True)
    if not why or not formulas.is_own(own):
        return ""
    found = layout.placed_use(blueprint, placed, own)
    pairs = [(found[device], use) for device, use in placed.use.items()]
    return why if any(ours.prefill - ours.head < use.prefill - use.head for ours, use in pairs) else ""


def _text(found: _Capability) -> str:
    return f"{found[0]}.{found[1]}"
