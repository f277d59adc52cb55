"""Extract errors and frames of tracebacks from any text: one line, a log, output of a notebook or torchrun."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

#: How many characters are read, from the end: a traceback ends with its error.
LONGEST = 1 << 18
#: How many characters of one message are compared.
LONGEST_MESSAGE = 4000
#: How many errors of one text are compared, the last ones: a chain of causes, or the same error of every rank.
_MOST = 8

_ESCAPE = re.compile(r"\x1b\[[0-9;?]{0,16}[ -/]?[@-~]")
# "[rank0]: ", "[rank0]:[E123 ...] ", "E   " (pytest), "(worker pid=12) "; each at most a few times.
_PREFIX = re.compile(r"(?:\[(?:rank|default)?\d{1,5}\]:? ?|E {2,6}|\(\w{1,40} pid=\d{1,9}\) ?|\| {1,9}){1,3}")
_ERROR = re.compile(r"((?:[A-Za-z_]\w{0,80}\.){0,8}[A-Z]\w{0,120}(?:Error|Exception|Warning))(?:: ?(.{0,4000})|$)")
#: An error in the middle of a line, as loggers and other programs write it.
_INSIDE = re.compile(r"\b([A-Z]\w{0,120}(?:Error|Exception|Warning)): (.{1,4000})$")
#: A Gemma 4 checkpoint: ``google/gemma-4-E2B-it``.
_MODEL = re.compile(r"(?:[\w.-]{1,60}/)?gemma-4-[\w.-]{0,60}\w", re.IGNORECASE)
_FRAME = re.compile(r'(?:File "?|^)([^"\n]{1,400}?\.py)"?(?:, line |:)\d{1,9}(?:, |\)?:? ?)(?:in (\w{1,120}))?')


class Frame(NamedTuple):
    """A frame of a traceback: the file as written there, with ``/``, and the function ("" if not given)."""

    file: str
    function: str


@dataclass(frozen=True)
class Message:
    """An error: the class without its module ("" if only a message was given) and the message, on one line."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" if self.kind and self.text else self.kind or self.text


@dataclass(frozen=True)
class Said:
    """The content of a text: errors, the last one first, the frames of all tracebacks, and the checkpoint it names."""

    messages: tuple[Message, ...]
    frames: tuple[Frame, ...]
    model: str = ""


def looks_like_an_error(text: str) -> bool:
    """Whether ``text`` is more likely an error than a misspelt patch id."""
    return bool(re.search(r"[\s:'\"(]", text.strip()) or _ERROR.fullmatch(text.strip()))


def read(text: str) -> Said:
    """The errors and frames in ``text``. :data:`LONGEST` bounds time and memory, whatever the text.

    A text in which no line looks like an error is one message.
    """
    lines = [_plain(line) for line in text[-LONGEST:].splitlines()]
    seen = (_FRAME.search(line[:1000]) for line in lines if ".py" in line)
    frames = tuple(Frame(match[1].replace("\\", "/"), match[2] or "") for match in seen if match)
    inside = (_INSIDE.search(line[-5000:]) for line in lines)
    found = _errors(lines) or [Message(match[1], match[2]) for match in inside if match]
    if not found:
        shown = " ".join(" ".join(lines)[:LONGEST_MESSAGE].split())
        found = [Message("", shown)] if shown else []
    model = next((match[0] for line in reversed(lines) if (match := _MODEL.search(line[-5000:]))), "")
    return Said(tuple(dict.fromkeys(reversed(found[-_MOST:]))), frames, model)


def _errors(lines: list[str]) -> list[Message]:
    """Errors that begin a line, each with the lines after it, up to a blank line or the next traceback."""
    found: list[Message] = []
    index = 0
    while index < len(lines):
        match = _ERROR.match(lines[index]) if len(lines[index]) < 2 * LONGEST_MESSAGE else None
        index += 1
        if match is None:
            continue
        parts, length = [match[2] or ""], len(match[2] or "")
        while index < len(lines) and length < LONGEST_MESSAGE and _goes_on(lines[index]):
            parts.append(lines[index])
            length += len(lines[index])
            index += 1
        text = " ".join(" ".join(parts).split())
        found.append(Message(match[1].rpartition(".")[2], text[:LONGEST_MESSAGE]))
    return found


def _goes_on(line: str) -> bool:
    return bool(line.strip()) and not line.startswith("Traceback (") and _ERROR.match(line[:5000]) is None


def _plain(line: str) -> str:
    line = _ESCAPE.sub("", line).rstrip()
    found = _PREFIX.match(line)
    return line[found.end() :] if found else line
