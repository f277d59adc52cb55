"""Where a Gemma 4 layer looks up its attention function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gemma4_compat._engine.patch import Target

_MODULE = "transformers.modeling_utils"


def targets(replacement: Callable[..., Any], dormant: Callable[[bool], bool] | None = None) -> tuple[Target, ...]:
    """The lookup, once per layer. ``replacement(original, self, key)``; from 5.7 on a default follows the key."""
    return (
        Target(
            module=_MODULE,
            name="AttentionInterface.__getitem__",
            replacement=replacement,
            affected="<5.7.0",
            dormant=dormant,
        ),
        Target(
            module=_MODULE,
            name="AttentionInterface.get_interface",
            replacement=replacement,
            affected=">=5.7.0",
            dormant=dormant,
        ),
    )
