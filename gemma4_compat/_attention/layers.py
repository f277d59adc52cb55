"""Which layers compute the attention of a Gemma 4's text."""

from __future__ import annotations

from typing import Any

_NAMES = ("Gemma4TextAttention", "Gemma4UnifiedTextAttention")


class OneGroup:
    """Such a layer whose keys and values already have a head for each head of its queries."""

    num_key_value_groups = 1

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        if name == "_layer":
            raise AttributeError(name)
        return getattr(self._layer, name)


def is_text(module: Any) -> bool:
    """Whether ``module`` computes attention of a Gemma 4's text, as itself or as :class:`OneGroup`."""
    return type(module) is OneGroup or type(module).__name__ in _NAMES
