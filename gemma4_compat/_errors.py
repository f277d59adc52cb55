"""The error and the warning that users may catch or filter, and how they show text from files."""

from __future__ import annotations

#: Longest message. Its beginning says where and what, its end what to do.
_LONGEST = 4000


def printable(text: str) -> str:
    r"""``text`` on one line, with unprintable characters as escapes (``\x1b``, ``\u202e``, ``\n``).

    Names and values in files can hold characters that control a terminal, change the direction of text, or exist in no
    encoding.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def _message(text: str) -> str:
    """A message, shortened if names and values in it are very long, as :func:`printable` shows it."""
    shown = printable(text)
    if len(shown) <= _LONGEST:
        return shown
    return f"{shown[: _LONGEST // 2]} [{len(shown) - _LONGEST} characters left out] {shown[-_LONGEST // 2 :]}"


class Gemma4CompatError(RuntimeError):
    """A fix cannot be made, or a value it needs is gone. The message names the value and the remedy."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(_message(item) if isinstance(item, str) else item for item in args))


class OffloadedWeightsError(Gemma4CompatError, NotImplementedError):
    """An operation needs the values of offloaded weights; upstream raises ``NotImplementedError`` half-way."""


class Gemma4CompatWarning(UserWarning):
    """Something the user should know once: a patch that could not be applied, an argument without effect."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(_message(item) if isinstance(item, str) else item for item in args))
