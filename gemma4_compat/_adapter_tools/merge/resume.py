"""Resume a killed merge: complete files are kept, everything else is written again.

The folder of a merge has a journal. It says what the merge is, and gets a line for each weight file once the whole
file is on the disk, with the digest of its content. With a quantized result, the files of the merged model (in a
folder inside) come first, then those of the result. A merge takes files over only if everything is the same: inputs
(every file's size, times and inode), options, releases of the libraries, the tensors of each file. It reads the files
again and compares their digests, so a partial or changed file is never trusted.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gemma4_compat._engine.io import notice, temporary
from gemma4_compat._gemma4.checkpoint import shards
from gemma4_compat._gemma4.checkpoint.shards import Output

JOURNAL = ".gemma4-compat-journal"


def identity(inputs: Iterable[Path], files: Sequence[Sequence[Output]], settings: Any) -> str:
    """The digest of everything that the values of a merge depend on.

    Args:
        inputs: folders that are read.
        files: the tensors of each file with weights.
        settings: options and releases; values that JSON cannot hold count by their ``repr``.
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
    """The journal of a merge in ``folder``, which no other process uses; ``identity`` comes from :func:`identity`."""

    def __init__(self, folder: Path, identity: str) -> None:
        self._folder = folder
        self._identity = identity
        self._file = folder / JOURNAL

    def done(self, folder: Path) -> Callable[[str, str], None]:
        """A function that records, by name and digest, that a file in ``folder`` is completely on the disk."""

        def note(name: str, digest: str) -> None:
            if not self._file.exists():
                self._add({"merge": self._identity})
            self._add({"file": (folder.relative_to(self._folder) / name).as_posix(), "digest": digest})

        return note

    def remove(self) -> None:
        """Remove the journal, before the folder gets its final name."""
        self._file.unlink(missing_ok=True)

    def take(self, leftovers: Sequence[Path], *inside: Path) -> dict[Path, set[str]]:
        """Move the complete files of a killed merge here, and remove its other leftovers.

        Args:
            leftovers: its folders, which no process uses.
            inside: the folders with files: the journal's own, or inside it.

        Returns:
            For each of these folders, the names of the files that are there now.
        """
        taken: dict[Path, set[str]] = {folder: set() for folder in inside}
        for left in leftovers:
            known = _entries(left / JOURNAL, self._identity)
            for folder, names in taken.items():
                place = folder.relative_to(self._folder)
                for name, digest in known.get(place.as_posix(), {}).items():
                    if name not in names and _move(left / place / name, folder / name, digest):
                        names.add(name)
                        self.done(folder)(name, digest)
            temporary.remove(left)
            count = sum(map(len, taken.values()))
            kept = f"{count} complete files are kept, the rest" if count else "its folder"
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


def _entries(file: Path, identity: str) -> dict[str, dict[str, str]]:
    """Folder -> name -> digest of the files in the journal of the same merge; empty if it is another merge's."""
    try:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    except (OSError, ValueError):
        return {}
    if not lines or not all(isinstance(line, dict) for line in lines) or lines[0].get("merge") != identity:
        return {}
    found: dict[str, dict[str, str]] = {}
    for line in lines[1:]:
        path, digest = line.get("file"), line.get("digest")
        if isinstance(path, str) and isinstance(digest, str):
            folder, _, name = path.rpartition("/")
            if name == Path(name).name:  # not "..", not part of a path
                found.setdefault(folder or ".", {})[name] = digest
    return found


def _move(source: Path, target: Path, digest: str) -> bool:
    """Move a file if its content has the digest; it is read after the move to where nobody else writes."""
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
