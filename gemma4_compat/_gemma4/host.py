"""What this machine has: what some patches require before they apply, its GPU, and free memory."""

from __future__ import annotations

import sys
from typing import Any

from gemma4_compat._engine.patch import Detection


def has_cuda() -> Detection:
    """For defects that need a CUDA device; the libraries concerned have queried torch by then."""
    import torch

    return Detection.AFFECTED if torch.cuda.is_available() else Detection.NOT_AFFECTED


def packs_for_cpu() -> Detection:
    """Bitsandbytes repacks 4-bit weights for its fused kernel only on CPUs with AVX512-BF16."""
    functional = sys.modules["bitsandbytes.functional"]
    return Detection.AFFECTED if functional.has_avx512bf16() else Detection.NOT_AFFECTED


def capability(device: Any) -> tuple[int, int] | None:
    """The CUDA compute capability of a device; None for others: ROCm's are "cuda" to PyTorch, with AMD's numbers."""
    import torch

    if device.type != "cuda" or torch.version.hip is not None:
        return None
    found = torch.cuda.get_device_properties(device)
    return found.major, found.minor


def free_memory(device: Any, kept: int = 0) -> int | None:
    """Bytes that PyTorch can still allocate, without unused ones that graphs have ``kept``; None without CUDA."""
    import torch

    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) - kept
    return int(torch.cuda.mem_get_info(device)[0] + max(unused, 0))


def give_back_unused(device: Any) -> None:
    """Have PyTorch give back memory that it keeps and no tensor has. Waits for the device; not inside a capture."""
    import torch

    if device.type == "cuda":
        torch.cuda.empty_cache()
