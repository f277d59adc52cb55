"""What some patches ask of the host before they apply."""

from __future__ import annotations

from gemma4_compat._patch import Detection


def has_cuda() -> Detection:
    """For defects that need a CUDA device; the libraries in question have asked torch the same by then."""
    import torch

    return Detection.AFFECTED if torch.cuda.is_available() else Detection.NOT_AFFECTED
