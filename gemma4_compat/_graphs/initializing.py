"""Layers of a static cache that take the memory of earlier ones: what their initialization sets, without running it.

``lazy_initialization`` of transformers allocates tensors that are then replaced by those of the last cache: some 150
small operations for the 15 layers of an E2B, before each prompt.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

#: What layers set is remembered if it has one of these types: no two layers can change it for each other.
_CONSTANTS = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Initialized:
    """What ``lazy_initialization`` set in a layer, apart from its three tensors.

    Attributes:
        function: of the layer's class.
        attributes: by name.
    """

    function: Any
    attributes: dict[str, Any]

    @classmethod
    def of(cls, layer: Any, before: dict[str, Any]) -> Initialized | None:
        """What differs from ``before``, its attributes then; None if that cannot be shared by several layers."""
        import torch

        own = (layer.keys, layer.values, layer.cumulative_length)
        found = {
            name: value
            for name, value in vars(layer).items()
            if (name not in before or before[name] is not value) and not any(value is tensor for tensor in own)
        }
        if not all(isinstance(value, (*_CONSTANTS, torch.dtype, torch.device)) for value in found.values()):
            return None
        return cls(type(layer).lazy_initialization, found)


def fill(layers: list[Any], known: list[Initialized | None], tensors: tuple[Any, ...]) -> bool:
    """Have layers take these tensors, zeroed, with the attributes of earlier layers. False, and nothing is changed,
    if what their initialization would do is not known.

    Args:
        layers: without tensors.
        known: for each layer.
        tensors: of the layers: keys, values and length of each.
    """
    import torch

    if 3 * len(layers) != len(tensors) or torch.is_inference_mode_enabled() != tensors[0].is_inference():
        return False
    if any(one is None or one.function is not type(layer).lazy_initialization for layer, one in zip(layers, known)):
        return False
    own = iter(tensors)
    for layer, one in zip(layers, known):
        assert one is not None
        vars(layer).update(one.attributes)
        layer.keys, layer.values, layer.cumulative_length = itertools.islice(own, 3)
    for dtype in {tensor.dtype for tensor in tensors}:
        torch._foreach_zero_([tensor for tensor in tensors if tensor.dtype == dtype])
    return True
