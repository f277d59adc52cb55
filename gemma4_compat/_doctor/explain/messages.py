"""Extract errors and frames of tracebacks from any text: one line, a log, output of a notebook or torchrun."""

from __future__ import annotations

import builtins
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

#: How many characters are read, from the end: a traceback ends with its error.
LONGEST = 1 << 18
#: How many characters of one message are compared.
LONGEST_MESSAGE = 4000
#: How many errors of one text are compared, the last ones: a chain of causes, or the same error of every rank.
_MOST = 8

#: Widths of terminals, and how many full lines make a text a broken one.
_NARROWEST, _WIDEST, _BROKEN = 60, 240, 2

_ESCAPE = re.compile(r"\x1b\[[0-9;?]{0,16}[ -/]?[@-~]")
# "[rank0]: ", "E   " (pytest), "(worker pid=12) ", "> " (a reply), a box of rich, "trainer-1  | " (Docker Compose),
# the time of a log, with the stream (Kubernetes) or the level, "04-23 12:00:01 [core.py:1108] " after it (vLLM),
# "ERROR:hf-to-gguf:"; each at most a few times.
_PREFIX = re.compile(
    r"(?:\[(?:rank|default)?\d{1,5}\]:? ?|E {2,6}|\(\w{1,40} pid=\d{1,9}\) ?|\| {1,9}|(?:> ?){1,4}|[│┃] ?"
    r"|[\w.-]{1,60} {1,20}\| |\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]{0,10}(?:Z|[+-]\d\d:?\d\d)?\]? "
    r"|\[?\d\d:\d\d:\d\d[.,\d]{0,10}\] |\d\d-\d\d (?:\d\d:\d\d:\d\d )?\[?[\w./]{1,60}:\d{1,6}\] ?"
    r"|std(?:out|err) [FP] |(?:ERROR|CRITICAL|WARNING|INFO)(?::[\w.-]{1,40}:|(?::|\b) )){1,4}"
)
_BORDERS = ("╭", "╰", "┏", "┗")
#: What a box of rich has at the end of a line.
_SUFFIX = re.compile(r" *[│┃]$")
_ERROR = re.compile(r"((?:[A-Za-z_]\w{0,80}\.){0,8}[A-Z]\w{0,120}(?:Error|Exception|Warning))(?:: ?(.{0,4000})|$)")
#: How a traceback begins: by itself, in a group of exceptions, or after the error's class (IPython).
_HEADER = re.compile(r"(?: {2,}\+ Exception Group |([A-Za-z_]\w{0,120}) {2,200})?Traceback \(most recent call last\)")
#: What ends it: an error of any class.
_ANY_ERROR = re.compile(r"((?:[A-Za-z_]\w{0,80}\.){0,8}[A-Za-z_]\w{0,120})(?:: ?(.{0,4000})|$)")
#: What a line of an exception in a group has in front, and a line between two.
_GROUP, _BETWEEN = re.compile(r" {2,40}\| ?"), re.compile(r" {2,40}\+[-+]{2,20}[-+ \d.]{0,60}")
#: An error in the middle of a line, as loggers and other programs write it.
_INSIDE = re.compile(r"\b([A-Z]\w{0,120}(?:Error|Exception|Warning)): (.{1,4000})$")
#: A Gemma 4 checkpoint: ``google/gemma-4-E2B-it``.
_MODEL = re.compile(r"(?:[\w.-]{1,60}/)?gemma-4-[\w.-]{0,60}\w", re.IGNORECASE)
#: A release: of a path (``transformers-5.6.2``), of a list of packages, or as people write it.
_RELEASE = re.compile(
    r"\b(transformers|accelerate|peft|bitsandbytes)[`'\"]?(?: version)?(?:==|[-:@ ]) ?v?"
    r"(\d{1,3}\.\d{1,3}(?:\.\d{1,3})?)\b",
    re.IGNORECASE,
)
_FRAME = re.compile(
    r'(?:File "?|^)([^"\n]{1,400}?\.py)"?(?:(?:, line |:|\()\d{1,9}(?:, |\)?:? ?)'
    r"(?:in (?:[\w<>]{1,80}\.){0,6}(<module>|\w{1,120}))?| in (<module>|\w{1,120})\()"
)


#: The end of a line that was broken at a space inside a frame.
_OPEN = re.compile(r'\.py(?:",(?: line(?: \d{1,9},(?: in)?)?)?|:\d{1,9} in)$')
_BARE = re.compile(r"\.py:\d{1,9}$")  # "in" comes on the next line


class Frame(NamedTuple):
    """A frame of a traceback: the file as written there, with ``/``, and the function ("" if not given).

    An import has the function ``<module>``.
    """

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
    """The content of a text: errors, the last one first, the frames of all tracebacks, and the checkpoint it names.

    ``releases`` are those of libraries that the text names, by distribution.
    """

    messages: tuple[Message, ...]
    frames: tuple[Frame, ...]
    model: str = ""
    releases: Mapping[str, str] = field(default_factory=dict)


def looks_like_an_error(text: str) -> bool:
    """Whether ``text`` is more likely an error than a misspelt patch id."""
    found = getattr(builtins, text.strip(), None)  # KeyboardInterrupt, StopIteration
    named = isinstance(found, type) and issubclass(found, BaseException)
    return bool(named or re.search(r"[\s:'\"(]", text.strip()) or _ERROR.fullmatch(text.strip()))


def read(text: str, *, pasted: bool = True) -> Said:
    """The errors and frames in ``text``. :data:`LONGEST` bounds time and memory, whatever the text.

    A text in which no line looks like an error is one message. If it was ``pasted``, a terminal may have broken lines.
    """
    lines = [_plain(line) for line in text[-LONGEST:].splitlines()]
    lines = _unwrapped(lines) if pasted else lines
    seen = (_FRAME.search(line[:1000]) for line in lines if ".py" in line)
    frames = tuple(Frame(match[1].replace("\\", "/"), match[2] or match[3] or "") for match in seen if match)
    inside = (_INSIDE.search(line[-5000:]) for line in lines)
    found = _errors(lines) or [Message(match[1], match[2]) for match in inside if match]
    if not found:
        shown = " ".join(" ".join(lines)[:LONGEST_MESSAGE].split())
        found = [Message("", shown)] if shown else []
    model = next((match[0] for line in reversed(lines) if (match := _MODEL.search(line[-5000:]))), "")
    named = (match for line in lines for match in _RELEASE.finditer(line[-5000:]))
    releases = {match[1].lower(): match[2] for match in named}
    return Said(tuple(dict.fromkeys(reversed(found[-_MOST:]))), frames, model, releases)


def _errors(lines: list[str]) -> list[Message]:
    """Errors that begin a line, each with the lines after it, up to a blank line or the next traceback.

    Their class is one of an error, by its name, or any that ends a traceback.
    """
    found: list[Message] = []
    index, ends = 0, ""  # "" outside a traceback; inside, the class that ends it, or "*"
    while index < len(lines):
        line = lines[index] if len(lines[index]) < 2 * LONGEST_MESSAGE else ""
        header, match = _HEADER.match(line), _ERROR.match(line)
        if match is None and ends and (last := _ANY_ERROR.match(line)) is not None and ends in ("*", last[1]):
            match = last
        index += 1
        if header is not None:
            ends = header[1] or "*"
        if header is not None or match is None:
            continue
        ends = ""
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
    if (group := _GROUP.match(line)) is not None:
        line = line[group.end() :]
    if line.startswith(_BORDERS) or _BETWEEN.fullmatch(line):
        return ""
    found = _PREFIX.match(line)
    return _SUFFIX.sub("", line[found.end() :] if found else line)


def _unwrapped(lines: list[str]) -> list[str]:
    """Lines that a terminal, or a box, broke at its width are one again.

    A terminal did if several lines are as long as the longest, and what follows them is not indented, as the source
    below a frame is.
    """
    width = max(map(len, lines), default=0)
    after = [below for line, below in itertools.pairwise(lines) if len(line) == width]
    indented = sum(line.startswith("  ") for line in after)
    full = _NARROWEST <= width <= _WIDEST and len(after) >= _BROKEN and indented < len(after) / 2
    joined: list[str] = []
    broken = False
    for line in lines:
        open_frame = joined and _OPEN.search(joined[-1][-200:]) is not None
        if open_frame or (joined and line.startswith("in ") and _BARE.search(joined[-1][-200:])):
            joined[-1] += f" {line.lstrip()}"
        elif broken:
            joined[-1] += line
        else:
            joined.append(line)
        broken = full and len(line) == width
    return joined
