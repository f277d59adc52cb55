"""TOML within limits, with messages instead of tracebacks.

The time of ``tomllib`` grows with the square of a dotted key's parts, and each table takes about a kilobyte, so the
text is checked first. Real files are far from these limits: Airflow's uv.lock of 3.3 MB has a tenth of the lines, and
its keys have at most five parts.
"""

from __future__ import annotations

import re
import reprlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gemma4_compat._errors import Gemma4CompatError

#: Lines of a file and dots outside of its strings: each may be a table.
MOST_NAMES = 200_000
#: Dots in a key, and characters of a key or of a value that is not a string.
MOST_DOTS, LONGEST_TOKEN = 20, 1000

#: The end of a token, or the beginning of a string or a comment.
_BORDER = re.compile(r"\"\"\"|'''|[\"'#\n=,{}\[\]]")
#: Beginning of a string or a comment -> its end, or text in it that only looks like its end.
_END = {
    '"""': re.compile(r'\\.|"{3,5}', re.DOTALL),
    "'''": re.compile(r"'{3,5}"),
    '"': re.compile(r'\\.|["\n]', re.DOTALL),
    "'": re.compile(r"['\n]"),
    "#": re.compile(r"\n"),
}


def parse(text: str, path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Args:
        text: its content.
        path: for messages.

    Raises:
        Gemma4CompatError: it is not TOML, or beyond the limits.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    _refuse_unbounded(text, path)
    try:
        data: dict[str, Any] = tomllib.loads(text)
    except RecursionError as error:
        raise Gemma4CompatError(f"{path} is not valid TOML: it is nested too deeply; correct it there") from error
    except ValueError as error:  # TOMLDecodeError is one, and int() raises others
        raise Gemma4CompatError(f"{path} is not valid TOML: {error}; correct it there") from error
    return data


def _refuse_unbounded(text: str, path: Path) -> None:
    names = text.count("\n") + 1
    position = dots = length = 0
    while (border := _BORDER.search(text, position)) is not None:
        more = text.count(".", position, border.start())
        dots, names = dots + more, names + more
        if names > MOST_NAMES:
            raise Gemma4CompatError(
                f"{path} has more than {MOST_NAMES} lines and dots in keys, which are not read; name another file"
            )
        length += border.start() - position
        _refuse_token(dots, length, path, text, position)
        position, token = border.end(), border[0]
        if (end := _END.get(token)) is None:
            dots = length = 0
            continue
        while (found := end.search(text, position)) is not None:
            position = found.end()
            if found[0][0] != "\\":
                break
        else:
            return  # it never ends; the parser has the better message
        if found[0] == "\n":
            dots = length = 0
    _refuse_token(dots + text.count(".", position), length + len(text) - position, path, text, position)


def _refuse_token(dots: int, length: int, path: Path, text: str, position: int) -> None:
    if dots > MOST_DOTS or length > LONGEST_TOKEN:
        line = text.count("\n", 0, position) + 1
        what = f"{dots} dots" if dots > MOST_DOTS else f"{length} characters"
        raise Gemma4CompatError(
            f"{path} line {line}: a key or a value of {what}; at most {MOST_DOTS} and {LONGEST_TOKEN} are read. "
            "Correct it there"
        )


def table(data: Mapping[str, Any], key: str, path: Path) -> dict[str, Any]:
    """The table of that key; empty if there is no such key."""
    value = data.get(key, {})
    if not isinstance(value, dict):
        raise Gemma4CompatError(f"{path}: {key} is {reprlib.repr(value)}; it must be a table")
    return value


def items(data: Mapping[str, Any], key: str, where: str) -> list[Any]:
    """The list of that key; empty if there is no such key."""
    value = data.get(key, [])
    if not isinstance(value, list):
        raise Gemma4CompatError(f"{where}: {key} is {reprlib.repr(value)}; it must be a list")
    return value


def strings(data: Mapping[str, Any], key: str, where: str) -> list[str]:
    """The list of strings of that key; empty if there is no such key."""
    value = items(data, key, where)
    wrong = [item for item in value if not isinstance(item, str)]
    if wrong:
        raise Gemma4CompatError(f"{where}: {reprlib.repr(wrong[0])} in {key} is not text; put it in quotes")
    return value
