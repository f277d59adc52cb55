"""The two things a user may want to catch or filter, and how text of files is shown in them."""

from __future__ import annotations

#: Characters of a message; its beginning says where and what, its end what to do.
_LONGEST = 4000


def printable(text: str) -> str:
    r"""``text`` on one line, with what ``str.isprintable`` refuses as its escape (``\x1b``, ``\u202e``, ``\n``).

    Names and values of files can hold characters that a terminal obeys, that turn the direction of text, or that no
    encoding has.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def _message(text: str) -> str:
    """A message for :func:`printable` to show: names and values in it may have any length, a message has not."""
    shown = printable(text)
    if len(shown) <= _LONGEST:
        return shown
    return f"{shown[: _LONGEST // 2]} [{len(shown) - _LONGEST} characters left out] {shown[-_LONGEST // 2 :]}"


class Gemma4CompatError(RuntimeError):
    """A repair cannot be made, or a value it would need is gone. The message names the value and the remedy."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(_message(item) if isinstance(item, str) else item for item in args))


class OffloadedWeightsError(Gemma4CompatError, NotImplementedError):
    """Something needs the values of offloaded weights: upstream it is torch's ``NotImplementedError`` half-way."""


class Gemma4CompatWarning(UserWarning):
    """Something the user should know once: a patch that could not apply, an argument that has no effect."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(_message(item) if isinstance(item, str) else item for item in args))
