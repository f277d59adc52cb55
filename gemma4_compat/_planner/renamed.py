"""Arguments under their old names: they work for another minor release, with a warning (docs/DEPRECATION.md)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from gemma4_compat._common import notice
from gemma4_compat._errors import Gemma4CompatError

_P = ParamSpec("_P")
_R = TypeVar("_R")


def renamed(**names: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Let a function take keyword arguments by their old names.

    Args:
        names: new names by old ones.

    Raises:
        Gemma4CompatError: from the function, for an argument given under both names.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> _R:
            for old in names.keys() & kwargs.keys():
                new = names[old]
                if new in kwargs:
                    raise Gemma4CompatError(f"{old} and {new} are the same argument; give {new} and leave {old} out")
                notice.warn_user(f"{old} is called {new} now; the old name will go", DeprecationWarning)
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return called

    return decorate
