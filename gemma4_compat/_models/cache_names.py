"""What transformers calls a cache among arguments: ``cache`` since 5.24, ``past_key_values`` before.

Since 5.24 its functions take the old name, too, with a warning. So what a user calls has either, and what transformers
calls itself has its own. Imports nothing upstream.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

NEW, OLD = "cache", "past_key_values"
NAMES = (NEW, OLD)


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """The cache among keyword arguments, by either name; None without one."""
    found = arguments.get(NEW)
    return arguments.get(OLD) if found is None else found


def renamed(arguments: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The arguments with the cache, if one is named among them, by this name alone."""
    others = {key: value for key, value in arguments.items() if key not in NAMES}
    return others if len(others) == len(arguments) else others | {name: cache_in(arguments)}


@functools.cache
def of(function: Callable[..., Any]) -> str:
    """The name that a function of transformers has for it."""
    return NEW if NEW in inspect.signature(function).parameters else OLD
