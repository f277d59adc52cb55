"""Compiled kernels on disk.

A file holds the kernels that were compiled together, and says which. Each kernel is looked up by its own text, not by
the program that it was in: a process finds the kernels of its model also if another process needed them in another
order, or shared out over another number of cores, or for another model.

A file counts only if this user owns it, nobody else may write it, and its checksum is right: the GPU runs what it
holds. Any other file is as if it were not there. Nothing here raises OSError: without a folder, kernels are compiled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
import sys
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

#: The folder; "off" (0, no, false, or nothing) for none.
VARIABLE = "GEMMA4_COMPAT_CACHE"
#: Bytes of a folder. Beyond that, files that were not used for the longest time are removed.
LIMIT = 64 << 20
_OFF = frozenset({"", "0", "false", "no", "off"})
_MAGIC = b"gemma4_compat kernels 1\n"
_DIGEST = hashlib.sha256().digest_size
_SUFFIX = ".kernels"
_UNFINISHED = ".unfinished"
_log = logging.getLogger("gemma4_compat")


@dataclass(frozen=True)
class Compiled:
    """Kernels that were compiled together.

    Attributes:
        binary: for the GPU.
        names: of the kernels in it, by what :func:`identity` returns.
    """

    binary: bytes
    names: dict[str, str]


def identity(text: str) -> str:
    """What stands for a text: its SHA-256, in hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def folder() -> Path | None:
    """Where this process keeps kernels; None for nowhere. The folder need not exist.

    It is the one that GEMMA4_COMPAT_CACHE names, else ``gemma4_compat/kernels`` in XDG_CACHE_HOME or ``~/.cache``.
    """
    asked = os.environ.get(VARIABLE)
    if asked is not None and asked.strip().lower() in _OFF:
        return None
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        if asked is not None:
            return Path(asked.strip()).expanduser().absolute()
        return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "gemma4_compat" / "kernels"
    except (RuntimeError, OSError) as error:  # a user without a home, a working directory that is gone
        _log.debug("gemma4_compat: compiled kernels are not kept on disk: %s", error)
        return None


class Files:
    """The files of one compiler and one architecture.

    Args:
        where: the folder, which is made when it is needed; None to keep nothing.
        key: what the binaries depend on besides the texts of their kernels.
        limit: bytes that the folder may hold.
    """

    def __init__(self, where: Path | None, key: str, limit: int = LIMIT) -> None:
        self._folder, self._key, self._limit = where, identity(key), limit
        self._known: dict[str, Collection[str]] = {}  # by name of a file that was read: its kernels

    def read(self, wanted: Collection[str]) -> list[Compiled]:
        """What is there of the kernels that are wanted, with others that were compiled with them.

        Args:
            wanted: the identities of their texts.
        """
        left, found = set(wanted), []
        for path in self._paths() if left else ():
            known = self._known.get(path.name)
            if known is not None and left.isdisjoint(known):
                continue
            compiled = self._read(path)
            self._known[path.name] = compiled.names.keys() if compiled else ()
            if compiled and not left.isdisjoint(compiled.names):
                found.append(compiled)
                left -= compiled.names.keys()
                with contextlib.suppress(OSError):  # then it is removed earlier
                    os.utime(path)
        return found

    def add(self, compiled: Compiled) -> None:
        """Write a file, which other processes see whole or not at all. Then remove old ones beyond the limit."""
        where = self._folder
        if where is None:
            return
        head = json.dumps({"key": self._key, "names": compiled.names}, sort_keys=True).encode()
        body = head + b"\n" + compiled.binary
        name = f"{self._key[:16]}-{identity(' '.join(sorted(compiled.names)))[:32]}{_SUFFIX}"
        try:
            where.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._is_private(where):
                return
            descriptor, temporary = tempfile.mkstemp(suffix=_UNFINISHED, dir=where)  # for this user only
            unfinished = Path(temporary)
            try:
                with open(descriptor, "wb") as stream:  # noqa: PTH123 (a descriptor)
                    stream.write(_MAGIC + hashlib.sha256(body).digest() + body)
                unfinished.replace(where / name)
            except OSError:
                unfinished.unlink(missing_ok=True)
                raise
            self._known[name] = compiled.names.keys()
            _shrink(where, self._limit)
        except OSError as error:
            self._give_up(error)

    def _paths(self) -> list[Path]:
        """Files of this key."""
        try:
            if self._folder is None or not self._is_private(self._folder):
                return []
            return sorted(self._folder.glob(f"{self._key[:16]}-*{_SUFFIX}"))
        except FileNotFoundError:  # it is made when there is something to keep
            return []
        except OSError as error:
            self._give_up(error)
            return []

    def _read(self, path: Path) -> Compiled | None:
        """What a file holds; None, and the file is removed, if it is broken."""
        try:
            # Not through a link.
            descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0))
            with open(descriptor, "rb") as stream:  # noqa: PTH123 (a descriptor)
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode) or not _only_ours(status):
                    _log.debug("gemma4_compat: %s is not used: others may have written it", path)
                    return None
                data = stream.read(self._limit + 1)
        except OSError as error:
            _log.debug("gemma4_compat: a kernel file is not used: %s", error)
            return None
        begin = len(_MAGIC) + _DIGEST
        body = data[begin:]
        if data[:begin] == _MAGIC + hashlib.sha256(body).digest():
            head, _, binary = body.partition(b"\n")
            found = json.loads(head)
            if found["key"] == self._key:
                return Compiled(binary, found["names"])
        _log.debug("gemma4_compat: %s is broken, and is removed", path)
        with contextlib.suppress(OSError):  # then it stays, and is not used
            path.unlink()
        return None

    def _is_private(self, where: Path) -> bool:
        """Whether nobody else can put files there."""
        private = all(map(_only_ours, (where.lstat(), where.stat())))
        if not private:
            self._give_up(f"others may write to {where}")
        return private

    def _give_up(self, why: OSError | str) -> None:
        """Keep nothing from now on."""
        level = logging.WARNING if VARIABLE in os.environ else logging.DEBUG  # a folder that the user named
        _log.log(level, "gemma4_compat: compiled kernels are not kept on disk: %s", why)
        self._folder = None


def _shrink(where: Path, limit: int) -> None:
    """Remove what was not used for the longest time, beyond the limit."""
    entries = []
    for entry in os.scandir(where):
        if entry.name.endswith((_SUFFIX, _UNFINISHED)):
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                status = entry.stat(follow_symlinks=False)
                entries.append((status.st_mtime_ns, status.st_size, entry.path))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if total <= limit:
            break
        Path(path).unlink(missing_ok=True)
        total -= size


def _only_ours(status: os.stat_result) -> bool:
    """Whether only this user may write it; links count by their owner. Windows has no such bits."""
    if sys.platform == "win32":
        return True
    others = 0 if stat.S_ISLNK(status.st_mode) else status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return status.st_uid == os.geteuid() and not others
