"""Sequences of operations that a release of this package got wrong, found by the search and shrunk by it.

``python -m tests.search --sequences --regression ID`` runs one, as ``regressions.py`` has it for placements.
"""

from __future__ import annotations

from typing import Any

REGRESSIONS: list[Any] = []
