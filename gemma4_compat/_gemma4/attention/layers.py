"""Which layers compute the attention of a Gemma 4's text."""

from __future__ import annotations

from typing import Any

from gemma4_compat._engine.runtime.views import PlainView

_NAMES = ("Gemma4TextAttention", "Gemma4UnifiedTextAttention")


class OneGroup(PlainView):
    """Such a layer whose keys and values already have a head for each head of its queries."""

    num_key_value_groups = 1


def is_text(module: Any) -> bool:
    """Whether ``module`` computes attention of a Gemma 4's text, as itself or as :class:`OneGroup`."""
    return type(module) is OneGroup or type(module).__name__ in _NAMES
