"""Replay sequences that a release of this package got wrong, found by the search and shrunk by it.

``python -m tests.search.replays --regression ID`` runs one: exit 0 when it holds, 1 with what is wrong.
"""

from __future__ import annotations

from typing import Any

REGRESSIONS: list[Any] = []
