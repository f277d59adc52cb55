"""Commands that are killed: what they leave is found, named or removed by the next run, and by nobody else."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gemma4_compat import Gemma4CompatError, Gemma4CompatWarning
from gemma4_compat._doctor.reproductions import children, findings
from gemma4_compat._gemma4.checkpoint import folders
from tests.unit.commands.helpers import started

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="kills as POSIX does")

MERGE = """
import sys, time
from pathlib import Path
from gemma4_compat._gemma4.checkpoint import folders
with folders.staging(Path(sys.argv[1]).absolute()) as folder:
    (folder / "model.safetensors").write_bytes(b"half")
    print("writing", flush=True)
    time.sleep(60)
"""
DOCTOR = """
import time
from gemma4_compat._doctor.reproductions import children, findings
def alone(command, folder, **_):
    (folder / "model.safetensors").write_bytes(b"half")
    print("building", flush=True)
    time.sleep(60)
children.alone = alone
children.can_fork = lambda: False
next(findings.examine([], keep=False, note=print))
"""


def ended_by(number: int, script: str, *arguments: str, folder: Path) -> subprocess.Popen[str]:
    """Start a script, wait for its first line, and end it."""
    process = started("-c", script, *arguments, folder=folder, environment={"TMPDIR": str(folder)})
    assert process.stdout is not None
    assert process.stdout.readline()
    process.send_signal(number)
    process.communicate(timeout=30)
    return process


def write(out: Path) -> Path:
    """What a merge does with its folders. Returns the one it wrote in."""
    with folders.staging(out) as folder:
        (folder / "model.safetensors").write_bytes(b"whole")
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("script", [MERGE, DOCTOR], ids=["merge", "doctor"])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_signal_that_asks_leaves_nothing(tmp_path: Path, script: str, name: str) -> None:
    number = signal.Signals[name]
    process = ended_by(number, script, "new/deep/out", folder=tmp_path)
    assert process.returncode in (128 + number, -number, 1), process.returncode
    assert names(tmp_path) == []


def test_the_next_merge_removes_what_a_killed_one_left_and_says_so(tmp_path: Path) -> None:
    ended_by(signal.SIGKILL, MERGE, "out", folder=tmp_path)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith("out.partial-")
    with pytest.warns(Gemma4CompatWarning, match=f"was killed; its leftovers in '{left}' are removed"):
        assert write(tmp_path / "out") != left
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["model.safetensors"]


def test_a_merge_to_another_folder_names_what_a_killed_one_left(tmp_path: Path) -> None:
    ended_by(signal.SIGKILL, MERGE, "out", folder=tmp_path)
    (left,) = tmp_path.iterdir()
    with pytest.warns(Gemma4CompatWarning, match=f"'{left}' was left by a killed merge"):
        write(tmp_path / "other")
    assert names(tmp_path) == ["other", left.name]


def test_two_merges_to_one_folder_at_the_same_time_are_refused(tmp_path: Path) -> None:
    with folders.staging(tmp_path / "out") as folder:
        with pytest.raises(Gemma4CompatError, match=f"another merge is writing .* now, in '{folder}'"):
            write(tmp_path / "out")
        assert folder.is_dir()


def test_what_others_left_is_never_removed(tmp_path: Path) -> None:
    """A folder without the lock, a link, a file: no leftover of ours, whatever the name."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "mine").write_text("kept")
    without = tmp_path / "out.partial-abcdefgh"
    shutil.copytree(precious, without)
    (tmp_path / "out.partial-link").symlink_to(precious)
    (tmp_path / "out.partial-file").write_text("kept")
    before = names(tmp_path)
    with pytest.warns(Gemma4CompatWarning, match=f"'{without}' looks like the leftovers of a killed merge"):
        write(tmp_path / "out")
    assert names(tmp_path) == sorted([*before, "out"])
    assert (without / "mine").read_text() == (precious / "mine").read_text() == "kept"


def test_the_next_doctor_removes_what_a_killed_one_left_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended_by(signal.SIGKILL, DOCTOR, folder=tmp_path)
    (left,) = tmp_path.iterdir()
    kept = Path(tempfile.mkdtemp(prefix="gemma4-compat-", dir=tmp_path))  # as `doctor --keep` leaves it
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(children, "can_fork", lambda: False)
    monkeypatch.setattr(children, "alone", lambda *_, **__: {"built": ""})
    said: list[str] = []
    assert list(findings.examine([], keep=False, note=said.append)) == []
    assert said == [f"removed {left}, left by an earlier doctor that was killed"]
    assert names(tmp_path) == [kept.name]


def test_a_doctor_without_room_is_one_error_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    monkeypatch.setattr(children, "alone", lambda *_, **__: pytest.fail("a child was started"))
    with pytest.raises(Gemma4CompatError, match=rf"has 1000 bytes free and the tiny checkpoints need {findings.ROOM}"):
        list(findings.examine([], keep=False, note=print))
    assert names(tmp_path) == []


def test_a_merge_that_fails_leaves_no_folders_it_made(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), folders.staging(tmp_path / "new" / "deep" / "out"):
        raise ZeroDivisionError
    assert names(tmp_path) == []


@pytest.mark.parametrize("where", ["out", "base/out", "base", "adapter/deep/out", "elsewhere/out", "file/out", "."])
def test_outputs_that_would_touch_inputs_or_links_are_refused(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("base", "adapter", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    (tmp_path / "out").symlink_to(tmp_path / "empty")
    (tmp_path / "elsewhere").symlink_to(tmp_path / "base")
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path / "empty")
    before = names(tmp_path)
    target = Path() if where == "." else tmp_path / where
    with pytest.raises(Gemma4CompatError, match=r"is a link|is inside|exists; nothing|cannot be (written|replaced)"):
        write(folders.output(target, tmp_path / "base", tmp_path / "adapter"))
    assert names(tmp_path) == before


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 300, "ü" * 200])
def test_names_no_folder_can_have_are_one_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(Gemma4CompatError, match=r"is not a valid folder name|is longer than 255 bytes"):
        folders.output(f"{tmp_path}/{name}" if name else "")
    assert names(tmp_path) == []


def test_the_longest_name_works(tmp_path: Path) -> None:
    out = folders.output(tmp_path / ("ü" * 127))
    write(out)
    assert out.is_dir()
