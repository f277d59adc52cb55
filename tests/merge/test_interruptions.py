"""Merges that are cut short leave nothing behind."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat import Gemma4CompatError
from gemma4_compat._checkpoint import shards
from gemma4_compat._merge import check


@pytest.mark.parametrize("when", ["writing", "checking"])
@pytest.mark.parametrize(
    "what", [KeyboardInterrupt(), MemoryError(), OSError(errno.ENOSPC, "No space left"), "SIGTERM"]
)
def test_nothing_is_left_when_it_is_cut_short(
    workspace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: Any, when: str
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        assert list(tmp_path.iterdir()), "it fails while there is something to clean up"
        if what == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
            return b""
        raise what

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(*((shards, "as_bytes") if when == "writing" else (check, "compare")), fail)
    wanted = SystemExit if what == "SIGTERM" else type(what)
    if isinstance(what, OSError) and when == "writing":
        wanted = Gemma4CompatError
    with pytest.raises(wanted) as caught:
        gemma4_compat.merge_adapter(workspace.checkpoint, workspace.adapter("language"), tmp_path / "out", check=1)
    if wanted is Gemma4CompatError:
        assert "the disk is full" in str(caught.value)
        assert "model.safetensors' needs" in str(caught.value)
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_full_disk_is_seen_before_anything_is_written(
    workspace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from collections import namedtuple

    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("usage", "total used free")(10, 5, 5))
    with pytest.raises(Gemma4CompatError, match=r"has 5 bytes free and the merged model needs \d{6,}"):
        gemma4_compat.merge_adapter(workspace.checkpoint, workspace.adapter("language"), tmp_path / "out")
    assert not list(tmp_path.iterdir())
