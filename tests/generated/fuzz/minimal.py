"""A smaller input that fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.generated.fuzz.case import Case

_SECONDS = 15.0
_TRIES = 400


def minimal(case: Case, fails: Callable[[Case], bool], beat: Callable[[], None] = lambda: None) -> Case:
    """The smallest input found by leaving out files, options and ever smaller pieces of contents.

    Args:
        case: fails.
        fails: whether an input fails in the same way.
        beat: called before each try.
    """
    deadline, tries, progress = time.monotonic() + _SECONDS, 0, True
    while progress:
        progress = False
        for smaller in _smaller(case):
            tries += 1
            if tries > _TRIES or time.monotonic() > deadline:
                return case
            beat()
            if fails(smaller):
                case, progress = smaller, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    for name in case.files:
        yield replace(case, files={other: file for other, file in case.files.items() if other != name})
    for name in case.options:
        yield replace(case, options={other: value for other, value in case.options.items() if other != name})
    for name, file in case.files.items():
        if file.hole:
            yield replace(case, files={**case.files, name: replace(file, hole=0)})
        size = len(file.content)
        piece = size // 2
        while piece and file.kind == "file":
            for start in range(0, size, piece):
                content = file.content[:start] + file.content[start + piece :]
                yield replace(case, files={**case.files, name: replace(file, content=content)})
            piece //= 4 if size > 1000 else 2
