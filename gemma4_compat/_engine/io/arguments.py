"""What a caller passes to a public function, checked where it comes in. Imports nothing upstream."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gemma4_compat._errors import Gemma4CompatError

_LONGEST = 100


def shown(value: Any) -> str:
    """A value as an error names it: itself if it is short and plain, otherwise its type."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        text = repr(value[:_LONGEST] if isinstance(value, (str, bytes)) else value)
        if len(text) <= 2 * _LONGEST:
            return text
    return type(value).__name__


def model(value: Any, function: str) -> Any:
    """The model that a public function of this name was given.

    Raises:
        Gemma4CompatError: it is not a ``torch.nn.Module``.
    """
    if isinstance(value, type) or not hasattr(value, "named_modules"):
        raise Gemma4CompatError(
            f"{function} needs a model, a torch.nn.Module; got {shown(value)}. Pass what from_pretrained, PeftModel "
            "or dispatch_model returned."
        )
    return value


def path(value: Any, what: str) -> Path:
    """The path of a file or folder; ``what`` is which, for the message.

    Raises:
        Gemma4CompatError: it is not a string or a path.
    """
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise Gemma4CompatError(f"the {what} is {shown(value)}; give its path, a string or a Path")
    return Path(text)
