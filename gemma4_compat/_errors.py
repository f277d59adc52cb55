"""The two things a user may want to catch or filter."""

from __future__ import annotations


class Gemma4CompatError(RuntimeError):
    """A repair cannot be made, or a value it would need is gone. The message names the value and the remedy."""


class Gemma4CompatWarning(UserWarning):
    """Something the user should know once: a patch that could not apply, an argument that has no effect."""
