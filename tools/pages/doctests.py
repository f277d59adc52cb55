"""Examples in docstrings, on the API page: Markdown takes lines that begin with ``>>>`` for quotations.

Griffe loads this file (mkdocs.yml). It runs before Google-style sections are read.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

#: From a prompt to the next empty line.
_EXAMPLE = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.DOTALL | re.MULTILINE)


class Fenced(griffe.Extension):  # type: ignore[misc]
    """Fences around each."""

    def on_instance(self, *, obj: Any, **_given: Any) -> None:
        """For each module, class and function."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(docstring: str) -> str:
    """A docstring with its examples as code."""
    return _EXAMPLE.sub(lambda found: f"```pycon\n{found.group()}\n```", docstring)
