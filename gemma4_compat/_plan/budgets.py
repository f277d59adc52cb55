"""How much accelerator memory PyTorch may allocate: as given, by a card's name, or what is free on this machine."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

from gemma4_compat._engine.io.text import parse_size
from gemma4_compat._errors import Gemma4CompatError
from gemma4_compat._plan import speed

#: Bytes of a card that PyTorch cannot allocate: the driver, the CUDA context, a display.
_TAKEN = 1 << 30
#: Bytes of free memory on this machine's cards that a plan leaves to other programs.
_LEFT = 1 << 29


def of(vram: Any, card: str | None) -> dict[int | str, int]:
    """Bytes by accelerator.

    Args:
        vram: as for :func:`gemma4_compat.plan_device_map`. None: the memory of ``card``.
        card: a card by its name. None: the free memory of this machine's GPUs.

    Raises:
        Gemma4CompatError: ``vram`` cannot be understood, or is needed and was not given.
    """
    if vram is not None:
        return given(vram)
    if card is None:
        return _machine()
    gib = speed.card(card).gib
    if not gib:
        raise Gemma4CompatError(f"how much memory the card {card!r} has is not known here; give vram (--vram 8GiB)")
    return {0: (gib << 30) - _TAKEN}


def given(vram: Any) -> dict[int | str, int]:
    """Bytes by accelerator, from any ``vram`` that :func:`gemma4_compat.plan_device_map` takes."""
    if isinstance(vram, Mapping):
        return {device: _positive(size) for device, size in vram.items()}
    try:
        sizes: list[Any] = [vram] if isinstance(vram, (str, numbers.Real)) else list(vram)
    except TypeError as error:
        raise Gemma4CompatError(
            f"vram is {vram!r}; give a size ('8GiB', or bytes), one for each accelerator, or a mapping of them"
        ) from error
    return {index: _positive(size) for index, size in enumerate(sizes)}


def _positive(size: float | str) -> int:
    found = parse_size(size)
    if not found:
        raise Gemma4CompatError(f"vram is {size!r}; it must be more than 0: what PyTorch may allocate, such as 8GiB")
    return found


def _machine() -> dict[int | str, int]:
    found = machine()
    if not found:
        raise Gemma4CompatError(
            "this machine has no GPU whose memory could be read; give vram (--vram 8GiB), or a card by its name "
            "(--card 'RTX 3060')"
        )
    return found


def machine() -> dict[int | str, int]:
    """Bytes by accelerator: what is free on those that PyTorch sees, of one kind; empty without any."""
    import torch

    if torch.cuda.is_available():  # AMD's as well
        return {index: torch.cuda.mem_get_info(index)[0] - _LEFT for index in range(torch.cuda.device_count())}
    if torch.xpu.is_available() and hasattr(torch.xpu, "mem_get_info"):  # not in torch 2.4
        return {f"xpu:{index}": torch.xpu.mem_get_info(index)[0] - _LEFT for index in range(torch.xpu.device_count())}
    if torch.backends.mps.is_available() and hasattr(torch.mps, "recommended_max_memory"):  # nor this
        return {"mps": torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory() - _LEFT}
    return {}
