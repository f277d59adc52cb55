"""A ``torch.py`` of the user's own, before the library of that name on ``sys.path``."""

from __future__ import annotations

import importlib.util
import sys

from gemma4_compat._errors import Gemma4CompatError


def refuse(*names: str) -> None:
    """Raise ``Gemma4CompatError`` for a library in whose place a single file would be imported. Imports nothing.

    Each of the libraries this is about is a package. One that is not installed is left to the import.
    """
    for name in names:
        module = sys.modules.get(name)
        spec = importlib.util.find_spec(name) if module is None else getattr(module, "__spec__", None)
        if spec is not None and spec.submodule_search_locations is None and spec.has_location:
            raise Gemma4CompatError(
                f"{name} would be imported from {spec.origin!r}, which is not the library of that name; rename this "
                "file, or start from another folder"
            )
