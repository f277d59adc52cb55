"""A traceback as people paste it: from a terminal, a notebook, a forum, a log, Windows, several ranks."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

_PACKAGES = "/home/me/venv/lib/python3.11/site-packages/"
_WINDOWS = "C:\\Users\\Me\\venv\\Lib\\site-packages\\"


def whole(one: dict[str, Any]) -> str:
    """As Python 3.11 prints it."""
    return _python(one, lambda file: _PACKAGES + file)


def windows(one: dict[str, Any]) -> str:
    """The same on Windows."""
    return _python(one, lambda file: _WINDOWS + file.replace("/", "\\"))


def last_line(one: dict[str, Any]) -> str:
    """The error without its traceback."""
    return str(one["error"])


def first_line(one: dict[str, Any]) -> str:
    """The first line of the error, as a headline quotes it."""
    return str(one["error"].strip().partition("\n")[0])


def ranks(one: dict[str, Any]) -> str:
    """Two ranks of torchrun, which print at the same time and end with torchrun's own report."""
    lines = [f"[rank{rank}]: {line}" for rank in (0, 1) for line in whole(one).splitlines()]
    return "\n".join([*lines, *_TORCHRUN])


def quoted(one: dict[str, Any]) -> str:
    """A reply in a forum or an e-mail."""
    return "\n".join(f"> {line}" for line in whole(one).splitlines())


def wrapped(one: dict[str, Any]) -> str:
    """Copied from a terminal of 80 columns."""
    lines = [line[at : at + 80] for line in whole(one).splitlines() for at in range(0, max(1, len(line)), 80)]
    return "\n".join(lines)


def logged(one: dict[str, Any]) -> str:
    """A container's log: a time and the stream before each line."""
    return "\n".join(
        f"2026-11-26T14:22:52.{at:06}Z stderr F {line}" for at, line in enumerate(whole(one).splitlines())
    )


def composed(one: dict[str, Any]) -> str:
    """Docker Compose."""
    return "\n".join(f"trainer-1  | {line}" for line in whole(one).splitlines())


def notebook(one: dict[str, Any]) -> str:
    """IPython, with colours."""
    kind, _, text = one["error"].partition(": ")
    short = kind.rpartition(".")[2]
    lines = [f"\x1b[31m{'-' * 75}\x1b[39m", f"\x1b[31m{short}\x1b[39m{'Traceback (most recent call last)':>60}"]
    lines += ["\x1b[36mCell\x1b[39m\x1b[36m \x1b[39m\x1b[32mIn[7]\x1b[39m\x1b[32m, line 3\x1b[39m"]
    lines += [
        "\x1b[32m      1\x1b[39m inputs = inputs.to(model.device)",
        "\x1b[32m----> \x1b[39m\x1b[32m3\x1b[39m run()",
    ]
    for file, line, _, name, source in one["frames"]:
        lines += ["", f"\x1b[36mFile \x1b[39m\x1b[32m~/venv/lib/python3.11/site-packages/{file}:{line}\x1b[39m, in "]
        lines[-1] += f"\x1b[36m{name}\x1b[39m\x1b[34m(self, *args, **kwargs)\x1b[39m"
        lines += [f"\x1b[32m--> \x1b[39m\x1b[32m{line}\x1b[39m     {source}"]
    return "\n".join([*lines, "", f"\x1b[31m{short}\x1b[39m: {text}"])


def boxed(one: dict[str, Any]) -> str:
    """Rich, which draws a box and wraps paths."""
    width = 96
    lines = [f"╭{' Traceback (most recent call last) ':─^{width}}╮"]
    for file, line, name, _, source in one["frames"]:
        shown = textwrap.wrap(f"{_PACKAGES}{file}:{line} in {name}", width - 2, break_on_hyphens=False)
        lines += [f"│ {text:{width - 2}} │" for text in (*shown, "", f"❱ {line} {source}"[: width - 2], "")]
    return "\n".join([*lines, f"╰{'─' * width}╯", one["error"]])


def tested(one: dict[str, Any]) -> str:
    """The report of pytest, and its last line."""
    lines = [f"{file}:{line}: in {name}\n    {source}" for file, line, name, _, source in one["frames"]]
    lines = [f"../venv/lib/python3.11/site-packages/{line}" for line in lines]
    return "\n".join([*lines, *(f"E   {line}" for line in one["error"].splitlines())])


def _python(one: dict[str, Any], path: Callable[[str], str]) -> str:
    lines = ["Traceback (most recent call last):", '  File "/home/me/train.py", line 41, in <module>', "    run()"]
    for file, line, name, _, source in one["frames"]:
        lines += [f'  File "{path(file)}", line {line}, in {name}', f"    {source}", "    " + "^" * len(source)]
    return "\n".join([*lines, one["error"]])


_TORCHRUN = """\
E1126 14:22:57.421000 4711 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: 1) local_rank: 0
Traceback (most recent call last):
  File "/home/me/venv/bin/torchrun", line 8, in <module>
    sys.exit(main())
  File "/home/me/venv/lib/python3.11/site-packages/torch/distributed/launcher/api.py", line 264, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Root Cause (first observed failure):
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================""".splitlines()

#: Every way, by name.
STYLES = {
    style.__name__: style
    for style in (
        whole,
        last_line,
        first_line,
        notebook,
        windows,
        ranks,
        quoted,
        wrapped,
        logged,
        composed,
        boxed,
        tested,
    )
}
