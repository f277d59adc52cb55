"""Bases without weights, and adapters changed on the way."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._gemma4.adapters.saved import read
from tests.unit.gemma4.adapters.adapter_files import write_adapter


@pytest.fixture
def bare(workspace: Any, tmp_path: Path) -> Path:
    """The checkpoint without its weights, which a scan does not need."""
    folder = tmp_path / "base"
    folder.mkdir()
    shutil.copy(workspace.checkpoint / "config.json", folder)
    return folder


@pytest.fixture
def changed(workspace: Any, tmp_path: Path) -> Callable[..., Path]:
    """``changed(name, keys=..., **settings)``: an adapter of the workspace with other keys, or other settings."""

    def change(name: str, keys: Callable[[str], str | None] = lambda key: key, **settings: Any) -> Path:
        saved = read(workspace.adapter(name))
        shapes = {keys(key): tensor.shape for key, tensor in saved.tensors.items()}
        return write_adapter(
            tmp_path / "changed", {key: shape for key, shape in shapes.items() if key}, {**saved.config, **settings}
        )

    return change
