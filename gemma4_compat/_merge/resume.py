"""Go on with a merge that was killed: the files that are whole are taken over, everything else is written again.

The folder of a merge has a journal: what the merge is, then a line for each file with weights when all of it is on the
disk, with the digest of its content. Files are taken over by a merge that is the same in everything: inputs (every
file's size, times and inode), options, releases of the libraries, the tensors of each file. They are read again and
their digests compared, so a partial or changed one is never trusted.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gemma4_compat._checkpoint import shards
from gemma4_compat._checkpoint.shards import Output
from gemma4_compat._engine import notice, temporary

JOURNAL = ".gemma4-compat-journal"


def identity(inputs: Iterable[Path], files: Sequence[Sequence[Output]], settings: Any) -> str:
    """The digest of everything that the values of a merge depend on.

    Args:
        inputs: folders that are read.
        files: the tensors of each file with weights.
        settings: options and releases; what has no JSON counts by its ``repr``.
    """
    seen = [
        (str(file.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        for folder in inputs
        for file in sorted(folder.iterdir())
        for status in (file.stat(),)
    ]
    layout = [[(output.name, output.dtype, output.shape) for output in outputs] for outputs in files]
    text = json.dumps([seen, layout, settings], sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


class Journal:
    """The journal of a merge in ``folder``, which its process has to itself; ``identity`` is of :func:`identity`."""

    def __init__(self, folder: Path, identity: str) -> None:
        self._folder = folder
        self._identity = identity
        self._file = folder / JOURNAL

    def done(self, name: str, digest: str) -> None:
        """Note that a file is on the disk as a whole."""
        if not self._file.exists():
            self._add({"merge": self._identity})
        self._add({"file": name, "digest": digest})

    def remove(self) -> None:
        """Remove the journal: the folder gets its final name."""
        self._file.unlink(missing_ok=True)

    def take(self, leftovers: Sequence[Path], folder: Path) -> set[str]:
        """Move the whole files of a killed merge here, and remove what it left; returns their names.

        Args:
            leftovers: its folders, which no process uses.
            folder: for the files, inside of the journal's folder or itself.
        """
        taken: set[str] = set()
        for left in leftovers:
            known = _entries(left / JOURNAL, self._identity)
            inside = left / folder.relative_to(self._folder)
            for name, digest in known.items():
                if name not in taken and _move(inside / name, folder / name, digest):
                    taken.add(name)
                    self.done(name, digest)
            temporary.remove(left)
            kept = f"{len(taken)} files of it are whole and are kept, the rest" if taken else "what it left"
            notice.warn_user(f"an earlier merge to the same folder was killed; {kept}, {str(left)!r}, is removed")
        return taken

    def _add(self, entry: Mapping[str, str]) -> None:
        try:
            with self._file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(entry) + "\n")
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            raise shards.unwritable(error, self._file, 200) from error


def _entries(file: Path, identity: str) -> dict[str, str]:
    """Name -> digest of the files that a journal of the same merge has; empty for another one's."""
    try:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    except (OSError, ValueError):
        return {}
    if not lines or not all(isinstance(line, dict) for line in lines) or lines[0].get("merge") != identity:
        return {}
    found = {line.get("file"): line.get("digest") for line in lines[1:]}
    return {
        name: digest
        for name, digest in found.items()
        if isinstance(name, str) and isinstance(digest, str) and name == Path(name).name
    }


def _move(source: Path, target: Path, digest: str) -> bool:
    """Move a file if its content has the digest; it is read where nobody else writes."""
    try:
        if source.is_symlink() or not source.is_file():
            return False
        source.rename(target)
        if _digest(target) == digest:
            return True
        target.unlink()
    except OSError:  # another process took it, or it cannot be read: it is written again
        target.unlink(missing_ok=True)
    return False


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as stream:
        while piece := stream.read(shards.PIECE):
            digest.update(piece)
    return digest.hexdigest()
