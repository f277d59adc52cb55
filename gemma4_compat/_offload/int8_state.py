"""The state that a forward of bitsandbytes' ``Linear8bitLt`` leaves on its layer."""

from __future__ import annotations

import copy
from typing import Any


def reset(layer: Any) -> None:
    """Give ``layer`` a state without tensors. The state of its forward belongs to that forward's autograd graph.

    The graph keeps the old state alive: the backward pass reads the weight and its scales from it.
    """
    layer.state = copy.copy(layer.state)
    layer.state.reset_grads()
    layer.state.idx = None
