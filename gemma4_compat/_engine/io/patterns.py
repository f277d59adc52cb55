"""Try the regular expressions of configurations in a process that can be stopped, before PEFT matches them.

PEFT matches with ``re``, which backtracks: ``(a+)+$`` can take practically forever on one name. Neither another engine
nor a rule about an expression's text predicts how long ``re`` takes. So ``re`` itself matches the same expressions
with the same names in a child process that may compute for :data:`SECONDS`. Plain names need no trial.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gemma4_compat._errors import Gemma4CompatError

#: CPU time for all expressions of a configuration and all names of a model. Real ones take milliseconds.
SECONDS = 1.0
#: Characters of all expressions together; the longest real ones, full names of all linears, have 60,000.
LONGEST = 200_000

#: An expression that cannot backtrack: characters, and classes of one character.
_PLAIN = re.compile(r"(?:[\w.\-]|\\[.\-_dws])*")
_WALL = 60.0  # seconds of wall time; on a busy machine the child gets less CPU time

_CHILD = """
import json, re, signal, sys
if hasattr(signal, "setitimer"):
    signal.setitimer(signal.ITIMER_VIRTUAL, float(sys.argv[1]))
expressions, names = json.load(sys.stdin)
for number, (way, text) in enumerate(expressions):
    print(number, flush=True)
    try:
        match = getattr(re.compile(text), way)
    except (re.error, OverflowError, RecursionError) as error:
        print(json.dumps(str(error) or type(error).__name__))
        break
    for name in names:
        match(name)
else:
    print("done")
"""


def refuse_slow(config: Mapping[str, Any], names: Iterable[str], where: str) -> None:
    """Refuse a configuration whose expressions take too long on these names, or are invalid.

    Args:
        config: an adapter's configuration.
        names: of modules, in the model and in the file.
        where: the source of the configuration, for the message.

    Raises:
        Gemma4CompatError: the message names the expression.
    """
    found = [item for item in _expressions(config) if not _PLAIN.fullmatch(item[0])]
    if not found:
        return
    if sum(len(written) for written, *_ in found) > LONGEST:
        raise Gemma4CompatError(
            f"the patterns in {where} have more than {LONGEST} characters together, more than in any real adapter; "
            "shorten them"
        )
    said = _trial([(way, expression) for _, way, expression in found], list(names))
    if said[-1:] == ["done"]:
        return
    number = next((int(line) for line in reversed(said) if line.isdigit()), 0)
    written = found[number][0]
    shown = written if len(written) <= 200 else f"{written[:200]}..."
    if said and not said[-1].isdigit():
        raise Gemma4CompatError(f"{shown!r} in {where} is not a valid regular expression: {json.loads(said[-1])}")
    raise Gemma4CompatError(
        f"the pattern {shown!r} in {where} takes more than {SECONDS:g} s to match the modules' names: its "
        "repetitions can divide a name in too many ways. Write it without a repetition inside another"
    )


def _expressions(config: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Each expression as written, the function of ``re`` that PEFT calls, and the pattern it passes."""
    for name in ("target_modules", "exclude_modules", "feedforward_modules"):
        if isinstance(value := config.get(name), str):
            yield value, "fullmatch", value
    for name in ("rank_pattern", "alpha_pattern"):
        for pattern in config.get(name) or ():
            yield pattern, "match", rf"(.*\.)?({pattern})$"
    for pattern in config.get("modules_to_save") or ():
        yield pattern, "match", rf"(^|.*\.){pattern}($|\..*)"
    layers = config.get("layers_pattern") or ()
    for pattern in [layers] if isinstance(layers, str) else layers:
        yield pattern, "match", rf"(?:^|.*?\.){pattern}\.(\d+)\."


def _trial(expressions: list[tuple[str, str]], names: list[str]) -> list[str]:
    """The child's output: the number of each expression it began, then "done" or the error of the last."""
    if not sys.executable or getattr(sys, "frozen", False):
        raise Gemma4CompatError(
            f"the pattern {expressions[0][1]!r} must be tried in a separate process, which this application cannot "
            "start; use an installed Python"
        )
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CHILD, str(SECONDS)],
            input=json.dumps([expressions, names]),
            capture_output=True,
            encoding="utf-8",
            timeout=_WALL,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return (error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or "").split("\n")[:-1]
    except OSError as error:
        raise Gemma4CompatError(f"{sys.executable!r} cannot be started to try a pattern: {error.strerror}") from error
    if done.returncode > 0:
        raise Gemma4CompatError(f"a pattern could not be tried: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout.split("\n")[:-1]
