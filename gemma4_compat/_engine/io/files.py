"""Read a whole file, if it is a regular file and not larger than any real file of its kind."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from gemma4_compat._errors import Gemma4CompatError

MIB = 1 << 20


def read_bytes(path: Path, limit: int, what: str, *, included_by: str = "", remedy: str = "") -> bytes:
    """The content of a file.

    Args:
        path: of the file. A device or a pipe is refused, because it has no size and may have no end.
        limit: in bytes.
        what: the kind of file, for the message, such as "a configuration".
        included_by: the place that names the file, for the message.
        remedy: for a file that cannot be read.

    Raises:
        Gemma4CompatError: it cannot be read, is not a regular file, or is larger than ``limit``.
    """
    before, name = f"{included_by}: " if included_by else "", _shortened(os.fspath(path))
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a device or a pipe"
            raise Gemma4CompatError(f"{before}{name!r} is {kind}; give {what}, which is a file")
        if found.st_size <= limit:
            with path.open("rb") as stream:
                data = stream.read(limit + 1)
            if len(data) <= limit:
                return data
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        reason = getattr(error, "strerror", None) or error
        raise Gemma4CompatError(f"{before}{name!r} cannot be read ({reason}){remedy}") from error
    raise Gemma4CompatError(
        f"{before}{name!r} has {found.st_size} bytes, and {what} is read up to {limit}: it is something else, "
        "or damaged. Give another file"
    )


def exists(path: Path, kind: str = "file") -> bool:
    """Whether a "file" or a "folder" of that name exists.

    Raises:
        Gemma4CompatError: the name is invalid (too long, or with a null character), or may not be looked up.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Gemma4CompatError(f"{_shortened(os.fspath(path))!r} cannot be read: {reason}") from error
    return stat.S_ISREG(mode) if kind == "file" else stat.S_ISDIR(mode)


def _shortened(text: str, limit: int = 300) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."
