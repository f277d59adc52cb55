"""Merges that are cut short leave nothing behind."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat import Gemma4CompatError
from gemma4_compat._adapter_tools.merge import check
from gemma4_compat._gemma4.checkpoint import folders, shards
from tests.helpers import cut_short


@pytest.fixture(autouse=True)
def _signals_as_from_a_terminal() -> Iterator[None]:
    """SIGHUP ends a program, also where the tests are run by ``nohup``, which ignores it."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_merge_under_nohup_goes_on_after_the_terminal_is_closed(
    workspace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    compare = check.compare

    def hang_up(*arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGHUP)
        return compare(*arguments, **options)

    monkeypatch.setattr(check, "compare", hang_up)
    gemma4_compat.merge_adapter(workspace.checkpoint, workspace.adapter("language"), tmp_path / "out", check=1)
    assert (tmp_path / "out").is_dir()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.parametrize("when", ["writing", "checking"])
@pytest.mark.parametrize(
    "what", [KeyboardInterrupt(), MemoryError(), OSError(errno.ENOSPC, "No space left"), "SIGTERM", "SIGHUP"]
)
def test_nothing_is_left_when_it_is_cut_short(
    workspace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: Any, when: str
) -> None:
    fail = cut_short(what, tmp_path)
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP)
    monkeypatch.setattr(*((shards, "as_bytes") if when == "writing" else (check, "compare")), fail)
    wanted = SystemExit if isinstance(what, str) else type(what)
    if isinstance(what, OSError) and when == "writing":
        wanted = Gemma4CompatError
    with pytest.raises(wanted) as caught:
        gemma4_compat.merge_adapter(workspace.checkpoint, workspace.adapter("language"), tmp_path / "out", check=1)
    if wanted is Gemma4CompatError:
        assert "the disk is full" in str(caught.value)
        assert "model.safetensors' needs" in str(caught.value)
    assert not list(tmp_path.iterdir())
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP)) == before


@pytest.mark.parametrize("name", ["language", "text class"])
def test_a_full_disk_is_seen_before_anything_is_written(
    workspace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Also where the adapter's keys have other names here, so that the check needs a copy of its weights."""
    adapter = tmp_path / "adapter"
    shutil.copytree(workspace.adapter("language"), adapter)
    if name == "text class":
        renamed(adapter)
    usage, files = shutil.disk_usage(tmp_path), []

    def free(path: Path) -> Any:
        files.extend(file for file in path.rglob("*") if file.is_file() and file.stat().st_size)
        return usage._replace(free=needed - 1)

    needed = sum(entry.nbytes for entry in shards.checkpoint(workspace.checkpoint).values())
    needed += sum(file.stat().st_size for file in folders.other_files(workspace.checkpoint))
    if name == "text class":
        needed += sum(entry.nbytes for entry in shards.entries(adapter / "adapter_model.safetensors").values())
    monkeypatch.setattr(shutil, "disk_usage", free)
    with pytest.raises(Gemma4CompatError, match=rf"has {needed - 1} bytes free and the merged model needs {needed}"):
        gemma4_compat.merge_adapter(workspace.checkpoint, adapter, tmp_path / "out")
    assert files == [], "something was written before"
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def renamed(adapter: Path) -> None:
    """Give an adapter the names of the text-only class."""
    from safetensors.torch import load_file, save_file

    weights = adapter / "adapter_model.safetensors"
    values = {key.replace("model.language_model.", "model."): value for key, value in load_file(weights).items()}
    assert "base_model.model.model.layers.0" in " ".join(values)
    save_file(values, weights)
