"""Of a patch's tests its promise is in the fast suite; the details are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.patches.promise import Promise


@pytest.hookimpl(tryfirst=True)  # before what is marked is left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and not issubclass(getattr(item, "cls", None) or object, Promise):
            item.add_marker(pytest.mark.full)
