"""The table ``[tool.gemma4_compat]`` of a project's pyproject.toml.

The file is searched in the working directory and above it, up to the root of the repository. Outside a repository only
the working directory is searched, because the folders above may belong to somebody else. The nearest file with the
table counts. A file that does not mention the table is not parsed.
"""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemma4_compat._engine.io import notice
from gemma4_compat._errors import Gemma4CompatError

#: Bytes of a file; real files have some ten thousand.
LARGEST = 2**20
#: Names that mark the root of a repository.
_ROOTS = (".git", ".hg")
_TOOL, _NAME, _EITHER = (
    rf"""(?:"{word}"|'{word}'|{word})[ \t]*""" for word in ("tool", "gemma4_compat", "gemma4[-_]compat")
)
#: The beginning of a line that opens the table, or has one of its keys, in any notation.
_MENTIONED = "^(?:\ufeff)?" rf"[ \t]*(?:\[?[ \t]*{_TOOL}\.[ \t]*{_EITHER}|{_NAME}[.=]|{_TOOL}=)"
_KEYS = ("disable", "enable", "strict")


@dataclass(frozen=True)
class Project:
    """The settings of a project; None for those that it does not mention.

    Attributes:
        file: the file that has them.
        disable: ids, kinds, or "all".
        enable: ids.
        strict: a patch that cannot apply is an error.
    """

    file: Path
    disable: tuple[str, ...] | None = None
    enable: tuple[str, ...] | None = None
    strict: bool | None = None


def read() -> Project | None:
    """The settings of the project that the working directory is in; None if it has none.

    Raises:
        Gemma4CompatError: a value makes no sense, or the file is not TOML. The message names file and key.
    """
    for file in _candidates():
        try:
            with file.open("rb") as opened:
                content = opened.read(LARGEST + 1)
        except OSError as error:  # it may have nothing to do with this package
            notice.warn(f"{file} cannot be read: {error.strerror}; settings of gemma4_compat in it have no effect.")
            continue
        mentioned = b"gemma4" in content and re.search(_MENTIONED.encode(), content, re.MULTILINE)
        if mentioned and (found := _parse(content, file)) is not None:
            return found
    return None


def _candidates() -> Iterator[Path]:
    try:
        here = Path.cwd()
    except OSError:  # the working directory is gone
        return
    found = []
    for folder in (here, *here.parents):
        if os.path.isfile(folder / "pyproject.toml"):  # noqa: PTH113 - False, not an error, where it cannot be asked
            found.append(folder / "pyproject.toml")
        if any(os.path.lexists(folder / name) for name in _ROOTS):
            yield from found
            return
    yield from (file for file in found if file.parent == here)


def _parse(content: bytes, file: Path) -> Project | None:
    from gemma4_compat._engine.io import toml

    if len(content) > LARGEST:
        raise Gemma4CompatError(f"{file} is larger than {LARGEST} bytes and is not read; make it smaller")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Gemma4CompatError(f"{file} is not UTF-8: {error}; correct it there") from error
    try:
        tools = toml.table(toml.parse(text, file), "tool", file)
    except ModuleNotFoundError as error:
        raise Gemma4CompatError(
            f"{file} has settings of gemma4_compat; pip install {error.name} to read it"
        ) from error
    if "gemma4-compat" in tools:
        raise Gemma4CompatError(f"{file}: the table is [tool.gemma4_compat], not [tool.gemma4-compat]; rename it")
    if "gemma4_compat" not in tools:
        return None
    table = toml.table(tools, "gemma4_compat", file)
    for key in table:
        if key not in _KEYS:
            raise _error(file, key, f"is unknown; it has {', '.join(_KEYS)}")
    return Project(file, _ids(table, "disable", file), _ids(table, "enable", file), _flag(table, file))


def _ids(table: Mapping[str, Any], key: str, file: Path) -> tuple[str, ...] | None:
    value = table.get(key)
    if isinstance(value, str):
        value = [value]
    if value is None or (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        return None if value is None else tuple(value)
    raise _error(file, key, f"is {reprlib.repr(value)}; write a list of ids, such as ['peft-keep-dispatch']")


def _flag(table: Mapping[str, Any], file: Path) -> bool | None:
    value = table.get("strict")
    if value is None or isinstance(value, bool):
        return value
    raise _error(file, "strict", f"is {reprlib.repr(value)}; write true or false")


def _error(file: Path, key: str, what: str) -> Gemma4CompatError:
    return Gemma4CompatError(f"{file}: tool.gemma4_compat.{key} {what}")
