"""The calls, an area a module."""

from __future__ import annotations

import importlib
import pkgutil


def load() -> None:
    """Import every module here: that registers its calls."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
