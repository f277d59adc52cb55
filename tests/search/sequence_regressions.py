"""Sequences of operations that a release of this package got wrong, found by the search and shrunk by it.

``python -m tests.search --sequences --regression ID`` runs one: exit 0 when it holds, 1 with what is wrong. What holds
for the table of ``regressions.py`` holds here, too.
"""

from __future__ import annotations

import pytest

from tests.search.case import Case
from tests.search.sequence import Sequence, operation

REGRESSIONS = [
    # Seed 1012: RuntimeError: Tensor on device meta is not on the expected device cpu!
    pytest.param(
        Sequence(
            case=Case(
                model="conditional",
                per_layer=True,
                placement=(
                    ("", "main"),
                    ("model.language_model.embed_tokens", "offloaded"),
                ),
            ),
            operations=(
                operation("undo_and_install"),
                operation("forward", prompt="text"),
            ),
        ),
        id="revert-and-install",
    ),
]
