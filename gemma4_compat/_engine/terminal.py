"""What a command prints: text that a terminal only shows, and JSON that every parser reads."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from gemma4_compat._errors import printable

#: The number of the format of ``--json`` and of ``merge_report.json``; docs/JSON.md says when it changes.
SCHEMA = 1


class _Shown:
    """A stream that shows control characters of what is written as their escapes; lines stay lines."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        # A progress bar begins each of its writes with a carriage return.
        start = "\r" if text.startswith("\r") else ""
        lines = text[len(start) :].split("\n")
        self._stream.write(start + "\n".join(map(printable, lines)))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Inside, control characters of whatever this process prints are shown as escapes, also by other libraries."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (stream if stream is None else _Shown(stream) for stream in streams)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


def write(text: str, *, error: bool = False) -> None:
    """A line to standard output, or to standard error; to nowhere where the caller has closed it (``>&-``).

    Not by ``typer.echo``, which goes around the guard where it distrusts the encoding.
    """
    stream = sys.stderr if error else sys.stdout
    if stream is not None:
        stream.write(f"{text}\n")
        stream.flush()


def discard() -> None:
    """Send what is still buffered, and cannot be written, to nowhere: Python would try again at its end."""
    if sys.stdout is not None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def json_text(data: Mapping[str, Any]) -> str:
    """``data`` as a JSON object that begins with the number of its format.

    JSON has no numbers that are not finite: they are the strings "NaN", "Infinity" and "-Infinity".
    """
    return json.dumps(_plain({"schema": SCHEMA, **data}), indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()  # half a surrogate pair is no character
    if isinstance(value, Mapping):
        return {_plain(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
