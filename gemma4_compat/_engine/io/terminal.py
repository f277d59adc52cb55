"""The output of commands: text that a terminal shows and never obeys, and JSON that every parser reads."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from gemma4_compat._engine.io.text import wrapped
from gemma4_compat._engine.runtime.views import PlainView
from gemma4_compat._errors import printable

#: The number of the format of ``--json`` and of ``merge_report.json``; docs/JSON.md says when it changes.
SCHEMA = 1

#: Seconds that nothing need explain.
SOON = 1.0
_log = logging.getLogger("gemma4_compat")

#: Loggers that write while their library is imported.
_CHATTER = ("bitsandbytes", "torchao")
#: Seconds between two looks at the last line, and without other output until it is written.
_TICK = 1.0


class _Line:
    """The last line of a terminal: what goes on, and for how long. Whatever else is written takes its place.

    A thread writes the seconds, so that a command that is silent for a minute is seen to work.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._text, self._begun, self._written, self._is_shown = "", 0.0, 0.0, False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def say(self, text: str) -> None:
        """Show ``text`` from now on; "" shows nothing."""
        thread = self._thread
        with self._lock:
            self.remove()
            self._text, self._begun = text, time.monotonic()
            if text:
                self._show(text)
        if text and thread is None:
            self._ended.clear()
            self._thread = threading.Thread(target=self._tick, daemon=True)
            self._thread.start()
        elif thread is not None and not text:
            self._ended.set()
            thread.join()
            self._thread = None

    def remove(self) -> None:
        """Something else is written now."""
        with self._lock:
            self._written = time.monotonic()
            columns, stream = width(error=True), sys.stderr
            if self._is_shown and columns is not None and stream is not None:
                _raw(stream).write("\r" + " " * (columns - 1) + "\r")
                _raw(stream).flush()
            self._is_shown = False

    def _show(self, text: str) -> None:
        columns, stream = width(error=True), sys.stderr
        if columns is not None and stream is not None:
            self.remove()
            _raw(stream).write("\r" + text[: columns - 1])
            _raw(stream).flush()
            self._is_shown = True

    def _tick(self) -> None:
        while not self._ended.wait(_TICK):
            with self._lock:
                now = time.monotonic()
                if now - self._written >= _TICK / 2:
                    seconds = f" ({now - self._begun:.0f} s)"
                    room = (width(error=True) or 80) - 1 - len(seconds)
                    self._show(self._text[:room] + seconds)


_line = _Line()


class _Shown(PlainView):
    """A stream that writes control characters as escapes; lines stay lines."""

    def write(self, text: str) -> int:
        _line.remove()
        # A progress bar begins each of its writes with a carriage return.
        start = "\r" if text.startswith("\r") else ""
        lines = text[len(start) :].split("\n")
        self._of.write(start + "\n".join(map(printable, lines)))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Inside, control characters in what this process prints are shown as escapes, also when other libraries print.

    What :func:`overwrite` shows ends with it.
    """
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (stream if stream is None else _Shown(stream) for stream in streams)
    try:
        yield
    finally:
        overwrite("")
        sys.stdout, sys.stderr = streams


def width(*, error: bool = False) -> int | None:
    """Characters of a line of standard output (or error) if that is a terminal; None for a file or a pipe."""
    stream = sys.stderr if error else sys.stdout
    if stream is None or not stream.isatty():
        return None
    return max(40, shutil.get_terminal_size().columns)


def fitted(text: str) -> str:
    """``text``, one paragraph, in lines that fit the terminal."""
    return wrapped(text, width())


def overwrite(line: str) -> None:
    """Show ``line`` below all other output, with the seconds since then, until the next one; "" removes it.

    Only on a terminal. No line break is written.
    """
    if not line or width(error=True) is not None:
        _line.say(printable(line))


@contextlib.contextmanager
def without_chatter() -> Iterator[None]:
    """Inside, libraries do not log which of their optional parts are not installed when they are imported, and do not
    warn that one of them uses what another will remove.

    A level or a filter that the user has set stays.
    """
    loggers = [logging.getLogger(name) for name in _CHATTER]
    quiet = [logger for logger in loggers if logger.level == logging.NOTSET]
    for logger in quiet:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            if not sys.warnoptions:
                warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft|accelerate)\.")
            yield
    finally:
        for logger in quiet:
            logger.setLevel(logging.NOTSET)


def has_colour(*, error: bool = False) -> bool:
    """Whether standard output (or error) is a terminal with colours, and nobody refuses them (https://no-color.org)."""
    stream = sys.stderr if error else sys.stdout
    if stream is None or not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return os.name != "nt" or bool({"WT_SESSION", "ANSICON"} & os.environ.keys())


def write(text: str, *, error: bool = False, coloured: bool = False) -> None:
    """Write a line to standard output, or to standard error; nowhere if the caller has closed it (``>&-``).

    Not with ``typer.echo``, which bypasses the guard where it distrusts the encoding.

    Args:
        text: the line, or several.
        error: to standard error.
        coloured: the colours in ``text`` are this package's, and all other control characters are escapes already
            (:func:`~gemma4_compat._engine.io.text.table_text`).
    """
    stream = sys.stderr if error else sys.stdout
    if stream is None:
        return
    _line.remove()
    (_raw(stream) if coloured else stream).write(f"{text}\n")
    stream.flush()


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Inside, one line says what is waited for, once that takes longer than a second: on standard error if it is a
    terminal, and in the log.
    """

    def say() -> None:
        _log.info("gemma4_compat: %s", what)
        if width(error=True) is not None:
            write(f"gemma4_compat: {what}", error=True)

    timer = threading.Timer(SOON, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _raw(stream: Any) -> Any:
    return stream._of if isinstance(stream, _Shown) else stream


def discard() -> None:
    """Discard what is buffered and cannot be written; Python would try again when it exits."""
    if sys.stdout is not None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def json_text(data: Mapping[str, Any]) -> str:
    """``data`` as a JSON object that begins with the number of its format.

    Numbers that are not finite, which JSON lacks, are the strings "NaN", "Infinity" and "-Infinity".
    """
    return json.dumps(_plain({"schema": SCHEMA, **data}), indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()  # half a surrogate pair is not a character
    if isinstance(value, Mapping):
        return {_plain(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
