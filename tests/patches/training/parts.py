"""``train_fast`` with single parts of it."""

from __future__ import annotations

from typing import Any

import gemma4_compat


def only(model: Any, **parts: Any) -> Any:
    """The model with these parts of ``train_fast``, and no other."""
    named: dict[str, Any] = dict.fromkeys(("loss", "mlp", "windows", "products", "graphs"), False)
    return gemma4_compat.train_fast(model, **{**named, **parts})
