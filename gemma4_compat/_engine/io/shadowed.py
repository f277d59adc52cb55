"""Find a user's own ``torch.py`` that comes before the library of that name on ``sys.path``."""

from __future__ import annotations

import importlib.util
import sys

from gemma4_compat._errors import Gemma4CompatError


def refuse(*names: str) -> None:
    """Refuse libraries in whose place a single file would be imported: each of them is a package. Imports nothing.

    A library that is not installed is left to the import.

    Raises:
        Gemma4CompatError: a file is in the place of a library.
    """
    for name in names:
        module = sys.modules.get(name)
        spec = importlib.util.find_spec(name) if module is None else getattr(module, "__spec__", None)
        if spec is not None and spec.submodule_search_locations is None and spec.has_location:
            raise Gemma4CompatError(
                f"{name} would be imported from {spec.origin!r}, which is not the library of that name; rename this "
                "file, or start from another folder"
            )
