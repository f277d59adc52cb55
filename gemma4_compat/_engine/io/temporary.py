"""Working folders of one process: it removes them when it ends; if it cannot, the next run finds them.

A folder holds a file that its process keeps locked. The system releases the lock when the process ends, also when it
is killed. So a folder whose lock is free is a leftover; a folder without such a file may belong to somebody else.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

LOCK = ".gemma4-compat-in-use"


class Folder:
    """A new folder of this process. Call :meth:`release` before it gets its final name."""

    def __init__(self, parent: Path, prefix: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        self._lock: BinaryIO | None = None
        # The lock comes before the name, or another process could take this folder for a leftover.
        unnamed = self.path / f"{LOCK}.new"
        stream = unnamed.open("wb")
        if _is_locked_by_us(stream):
            self._lock = stream
            unnamed.rename(self.path / LOCK)
        else:  # a file system without locks: leftovers are reported, not removed
            stream.close()
            unnamed.unlink()

    def release(self) -> None:
        """Remove the lock: the folder can no longer become a leftover."""
        if self._lock is not None:
            (self.path / LOCK).unlink(missing_ok=True)
            self._lock.close()
            self._lock = None

    def remove(self) -> None:
        """Remove the folder with all that is in it."""
        _empty(self.path)
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        shutil.rmtree(self.path, ignore_errors=True)


def remove(leftover: Path) -> None:
    """Remove a leftover with all that is in it."""
    _empty(leftover)
    shutil.rmtree(leftover, ignore_errors=True)


def _empty(folder: Path) -> None:
    """Remove everything except the lock: if this process is killed meanwhile, the folder is still recognized."""
    for item in folder.iterdir():
        if item.is_dir() and not item.is_symlink():
            shutil.rmtree(item, ignore_errors=True)  # on Windows a memory-mapped file may outlive its reader
        elif item.name != LOCK:
            with contextlib.suppress(OSError):  # likewise
                item.unlink()


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise ``SystemExit``, unless the program handles them itself."""
    ours: list[int] = []

    def stop(number: int, _frame: Any) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGHUP"):  # Windows has no SIGHUP
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, stop)
                ours.append(number)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def leftovers(parent: Path, part: str) -> tuple[list[Path], list[Path], list[Path]]:
    """The folders in ``parent`` with ``part`` in their names: leftovers of a process that is gone, folders in use, and
    folders without a lock. Links, and folders of other users, are left out.
    """
    left: list[Path] = []
    used: list[Path] = []
    unknown: list[Path] = []
    try:
        found = sorted(Path(entry.path) for entry in os.scandir(parent) if _is_ours(entry, part))
    except OSError:  # no such folder, or it cannot be listed
        return left, used, unknown
    for path in found:
        try:
            with (path / LOCK).open("r+b") as stream:
                (left if _is_locked_by_us(stream) else used).append(path)
        except OSError:
            unknown.append(path)
    return left, used, unknown


def _is_ours(entry: os.DirEntry[str], part: str) -> bool:
    if part not in entry.name or not entry.is_dir(follow_symlinks=False):
        return False
    return sys.platform == "win32" or entry.stat(follow_symlinks=False).st_uid == os.getuid()


def _is_locked_by_us(stream: BinaryIO) -> bool:
    """Lock an open file, unless another process has; closing it releases the lock."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(stream.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
