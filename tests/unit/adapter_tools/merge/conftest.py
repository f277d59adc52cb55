"""Merges of tiny models: a base in shards, and checks that decode few tokens."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._adapter_tools.merge import check
from gemma4_compat._gemma4.checkpoint import shards


@pytest.fixture(scope="module", autouse=True)
def _stack() -> None:
    pytest.importorskip("bitsandbytes", reason="needs the upstream libraries: pip install 'gemma4-compat[test]'")


@pytest.fixture(autouse=True)
def _few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "NEW_TOKENS", 3)  # the time of a check is that of decoding


@pytest.fixture(scope="module")
def base(workspace: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint with files beside its weights, in three shards."""
    folder: Path = tmp_path_factory.mktemp("base") / "gemma"
    shutil.copytree(workspace.checkpoint, folder)
    entries = shards.checkpoint(folder)
    outputs = [shards.Output(name, entry.dtype, entry.shape) for name, entry in entries.items()]
    files = shards.shards(outputs, 500_000)
    assert len(files) >= 3
    (folder / "model.safetensors").rename(folder / "whole.bin")
    moved = {name: shards.Entry(**{**vars(entry), "file": folder / "whole.bin"}) for name, entry in entries.items()}
    values = {name: lambda e=entry: shards.pieces(e) for name, entry in moved.items()}
    shards.write(folder, files, values)
    (folder / "whole.bin").unlink()
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "preprocessor_config.json").write_text("{}")
    (folder / "README.md").write_text("the base's card")
    return folder
