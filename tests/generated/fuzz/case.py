"""One input: the files of a folder and the options of the call, as plain data that a corpus file can hold."""

from __future__ import annotations

import base64
import json
import os
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PLAIN = 4000  # longer contents are compressed in a corpus file


@dataclass(frozen=True)
class File:
    """A file of an input.

    Attributes:
        content: its bytes; of a link its target.
        hole: zeros behind them that take no room on the disk.
        kind: "file", "folder", "link" or "fifo".
    """

    content: bytes = b""
    hole: int = 0
    kind: str = "file"

    @property
    def nbytes(self) -> int:
        """What the operating system says its size is."""
        return len(self.content) + self.hole

    def write(self, path: Path) -> None:
        """Create it; what the file system cannot hold (a name of 300 characters) is left out."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if self.kind == "folder":
                path.mkdir(exist_ok=True)
            elif self.kind == "link":
                path.symlink_to(os.fsdecode(self.content))
            elif self.kind == "fifo":
                os.mkfifo(path)
            else:
                with path.open("wb") as stream:
                    stream.write(self.content)
                    if self.hole:
                        stream.truncate(self.nbytes)
        except (OSError, ValueError):
            if path.name.isprintable() and len(path.name) < 100:
                raise


@dataclass(frozen=True)
class Case:
    """An input: files by their path in the input's folder, and options by name."""

    files: Mapping[str, File] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all files and options."""
        return sum(file.nbytes for file in self.files.values()) + len(_source(dict(self.options)))

    def write(self, folder: Path) -> None:
        """Write the files into ``folder``, which is emptied first."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name, file in self.files.items():
            file.write(folder / name)

    def as_text(self, **more: Any) -> str:
        """The input as JSON, with ``more`` on top."""
        return json.dumps(
            {
                **more,
                "files": {name: _file_data(file) for name, file in self.files.items()},
                "options": {name: _option_data(value) for name, value in self.options.items()},
            },
            indent=1,
        )


def read(text: str) -> tuple[Case, dict[str, Any]]:
    """The input of a corpus file, and what is said about it."""
    data = json.loads(text)
    files = {name: _file(item) for name, item in data.pop("files").items()}
    options = {name: _option(value) for name, value in data.pop("options").items()}
    return Case(files, options), data


def _file_data(file: File) -> dict[str, Any]:
    data: dict[str, Any] = {} if file.kind == "file" else {"kind": file.kind}
    if file.hole:
        data["hole"] = file.hole
    if len(file.content) > _PLAIN:
        return data | {"zlib": base64.b64encode(zlib.compress(file.content, 9)).decode()}
    try:
        return data | {"text": file.content.decode()}
    except UnicodeDecodeError:
        return data | {"base64": base64.b64encode(file.content).decode()}


def _file(data: Mapping[str, Any]) -> File:
    if "zlib" in data:
        content = zlib.decompress(base64.b64decode(data["zlib"]))
    elif "base64" in data:
        content = base64.b64decode(data["base64"])
    else:
        content = data["text"].encode()
    return File(content, data.get("hole", 0), data.get("kind", "file"))


def _option_data(value: Any) -> Any:
    """JSON keeps no tuples, no bytes, no whole numbers of 5,000 digits: those are written as Python."""
    is_plain = not _is_huge(value) and repr(json.loads(json.dumps(value, default=repr))) == repr(value)
    return value if is_plain else {"python": _source(value)}


def _is_huge(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_is_huge, value))
    if isinstance(value, dict):
        return any(map(_is_huge, [*value, *value.values()]))
    return isinstance(value, int) and value.bit_length() > 10_000


def _source(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 10_000:
        return hex(value)
    if isinstance(value, (list, tuple)):
        inside = ", ".join(map(_source, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside},)" if value else "()"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_source(key)}: {_source(item)}" for key, item in value.items()) + "}"
    return repr(value)


def _option(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"python"}:
        return eval(value["python"], {"__builtins__": {}}, {"nan": float("nan"), "inf": float("inf")})
    return value
