"""Compiled kernels on disk: found again, by texts; anything broken, foreign or shared is as if it were not there."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gemma4_compat._kernels import kernel_files
from gemma4_compat._kernels.kernel_files import Compiled, Files, identity
from tests.helpers import child

posix = pytest.mark.skipif(sys.platform == "win32", reason="owners and permissions as POSIX has them")


def compiled(*texts: str, size: int = 100) -> Compiled:
    names = {identity(text): f"fused_{number}" for number, text in enumerate(texts)}
    return Compiled(b"\0\n" + "".join(texts).encode() * size, names)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "kernels"


def wanted(*texts: str) -> list[str]:
    return [identity(text) for text in texts]


def only_file(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def test_another_process_finds_kernels_whatever_the_order(folder: Path) -> None:
    first, second = compiled("a", "b"), compiled("c")
    for one in (first, second):
        Files(folder, "key").add(one)
    assert Files(folder, "key").read(wanted("c")) == [second]
    found = Files(folder, "key").read(wanted("c", "b", "unknown"))
    assert sorted(found, key=lambda one: len(one.names)) == [second, first]
    assert Files(folder, "key").read([]) == []


def test_a_running_process_finds_what_another_writes(folder: Path) -> None:
    files, other = Files(folder, "key"), Files(folder, "key")
    assert files.read(wanted("a")) == []
    other.add(compiled("a"))
    other.add(compiled("b"))
    assert files.read(wanted("a")) == [compiled("a")]
    assert files.read(wanted("a", "b")) == files.read(wanted("b", "a")) != []


def test_another_compiler_or_architecture_has_its_own(folder: Path) -> None:
    for key in ("13.0 sm_90", "13.0 sm_100"):
        assert Files(folder, key).read(wanted("a")) == []
        Files(folder, key).add(Compiled(key.encode(), {identity("a"): "fused_0"}))
    assert [one.binary for one in Files(folder, "13.0 sm_90").read(wanted("a"))] == [b"13.0 sm_90"]


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data[:30],
        lambda data: flipped(data, 0),
        lambda data: flipped(data, 30),
        lambda data: flipped(data, 70),
        lambda data: flipped(data, len(data) - 1),
        lambda data: data + b"x",
        lambda data: b"something else",
    ],
    ids=["empty", "cut", "cut in its head", "magic", "checksum", "head", "binary", "longer", "foreign"],
)
def test_a_broken_file_is_replaced(folder: Path, change: Callable[[bytes], bytes]) -> None:
    Files(folder, "key").add(compiled("a", "b"))
    file = only_file(folder)
    file.write_bytes(change(file.read_bytes()))
    files = Files(folder, "key")
    assert files.read(wanted("a")) == []
    assert list(folder.iterdir()) == []
    files.add(compiled("a", "b"))
    assert Files(folder, "key").read(wanted("a")) == files.read(wanted("a")) == [compiled("a", "b")]


def test_a_file_of_another_key_under_this_name_does_not_count(folder: Path) -> None:
    Files(folder, "other").add(compiled("a"))
    Files(folder, "key").add(compiled("b"))
    (theirs,) = (file for file in folder.iterdir() if file.name.startswith(identity("other")[:16]))
    theirs.rename(folder / theirs.name.replace(identity("other")[:16], identity("key")[:16]))
    assert Files(folder, "key").read(wanted("a")) == []


def test_what_was_not_used_for_the_longest_time_goes_first(folder: Path) -> None:
    files = Files(folder, "key", limit=4000)
    for number, text in enumerate("abc"):
        files.add(compiled(text, size=1000))
        for file in folder.iterdir():
            if file.stat().st_mtime > 1000:
                os.utime(file, (number, number))
    foreign = folder / "not ours.txt"
    foreign.write_bytes(b"x" * 9000)
    killed = folder / "abc.unfinished"  # of a process that was killed
    killed.write_bytes(b"x" * 500)
    os.utime(killed, (0, 0))
    assert files.read(wanted("a")) == [compiled("a", size=1000)]  # used now
    files.add(compiled("d", size=1000))
    kept = [text for text in "abcd" if Files(folder, "key").read(wanted(text))]
    assert kept == ["a", "c", "d"]
    assert not killed.exists()
    assert foreign.exists()
    assert sum(file.stat().st_size for file in folder.iterdir() if file != foreign) <= 4000


def test_one_file_larger_than_the_limit_is_not_kept(folder: Path) -> None:
    files = Files(folder, "key", limit=1000)
    files.add(compiled("a", size=2000))
    assert list(folder.iterdir()) == []
    assert files.read(wanted("a")) == []


@posix
def test_only_this_user_can_read_and_write_them(folder: Path) -> None:
    before = os.umask(0)
    try:
        Files(folder, "key").add(compiled("a"))
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert only_file(folder).stat().st_mode & 0o777 == 0o600


@posix
@pytest.mark.parametrize("what", ["link", "writable", "owner", "folder writable", "folder's owner"])
def test_what_others_could_have_written_is_not_used(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    Files(folder, "key").add(compiled("a"))
    file = only_file(folder)
    if what == "link":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    elif what == "writable":
        file.chmod(0o622)
    elif what == "folder writable":
        folder.chmod(0o777)
    else:
        ours = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: ours + 1)
    if what == "owner":
        monkeypatch.setattr(Files, "_is_private", lambda self, where: True)
    assert Files(folder, "key").read(wanted("a")) == []
    assert file.exists()  # it is not ours to remove
    if "folder" in what:
        Files(folder, "key").add(compiled("b"))
        assert only_file(folder) == file


@pytest.mark.parametrize("named", [False, True])
def test_without_a_folder_nothing_is_kept_and_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, named: bool
) -> None:
    caplog.set_level(logging.DEBUG, "gemma4_compat")
    (tmp_path / "file").write_text("no folder")
    where = tmp_path / "file" / "kernels"
    if named:
        monkeypatch.setenv(kernel_files.VARIABLE, str(where))
    files = Files(where, "key")
    for _ in range(2):
        assert files.read(wanted("a")) == []
        files.add(compiled("a"))
    (record,) = caplog.records
    assert record.levelno == (logging.WARNING if named else logging.DEBUG)
    assert "compiled kernels are not kept on disk" in record.message


def test_a_read_only_disk(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def read_only(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    caplog.set_level(logging.DEBUG, "gemma4_compat")
    monkeypatch.setattr(Path, "mkdir", read_only)
    files = Files(folder, "key")
    for text in "ab":
        files.add(compiled(text))
        assert files.read(wanted(text)) == []
    assert [record.levelno for record in caplog.records] == [logging.DEBUG]


def test_a_full_disk_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files(folder, "key")
    files.add(compiled("a"))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    files.add(compiled("b"))
    assert [one.names for one in Files(folder, "key").read(wanted("a", "b"))] == [compiled("a").names]
    only_file(folder)


_PROCESS = """
import sys
from pathlib import Path
from gemma4_compat._kernels.kernel_files import Compiled, Files, identity
folder, mine = Path(sys.argv[1]), sys.argv[2]
found = 0
for turn in range(150):
    files = Files(folder, "key", limit=12000)
    for text in ("shared", mine, f"{mine}{turn}"):
        expected = Compiled(text.encode() * 200, {identity(text): "fused_0"})
        for one in files.read([identity(text)]):
            assert one == expected, one
            found += 1
        files.add(expected)
    assert files._folder is not None
print(found)
"""


def test_processes_share_a_folder(folder: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda name: child("-c", _PROCESS, str(folder), name), ("one", "two")))
    for one in done:
        assert one.code == 0, one.stderr
        assert int(one.stdout) > 100
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 12000


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "home/.cache/gemma4_compat/kernels"),
        ({"XDG_CACHE_HOME": "{}/xdg"}, "xdg/gemma4_compat/kernels"),
        ({"XDG_CACHE_HOME": "relative"}, "home/.cache/gemma4_compat/kernels"),
        ({"XDG_CACHE_HOME": ""}, "home/.cache/gemma4_compat/kernels"),
        ({"XDG_CACHE_HOME": "{}/xdg", kernel_files.VARIABLE: "{}/named"}, "named"),
        ({kernel_files.VARIABLE: "~/named"}, "home/named"),
        *(({kernel_files.VARIABLE: off}, None) for off in ("off", "0", "", " False ")),
    ],
)
def test_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str | None
) -> None:
    for name in ("XDG_CACHE_HOME", kernel_files.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value.format(tmp_path))
    assert kernel_files.folder() == (None if expected is None else tmp_path / expected)


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("XDG_CACHE_HOME", kernel_files.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert kernel_files.folder() is None
    assert Files(None, "key").read(wanted("a")) == []
