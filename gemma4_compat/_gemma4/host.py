"""What some patches require of the host before they apply."""

from __future__ import annotations

import sys

from gemma4_compat._engine.patch import Detection


def has_cuda() -> Detection:
    """For defects that need a CUDA device; the libraries concerned have queried torch by then."""
    import torch

    return Detection.AFFECTED if torch.cuda.is_available() else Detection.NOT_AFFECTED


def packs_for_cpu() -> Detection:
    """Bitsandbytes repacks 4-bit weights for its fused kernel only on CPUs with AVX512-BF16."""
    functional = sys.modules["bitsandbytes.functional"]
    return Detection.AFFECTED if functional.has_avx512bf16() else Detection.NOT_AFFECTED
