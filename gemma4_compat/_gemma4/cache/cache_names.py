"""The name of a cache argument in transformers: ``cache`` since 5.24, ``past_key_values`` before.

Since 5.24 its functions also take the old name, with a warning. So users' calls may have either name, and calls inside
transformers have its own. Imports nothing upstream.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

NEW, OLD = "cache", "past_key_values"
NAMES = (NEW, OLD)


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """The cache among keyword arguments, under either name; None without a cache."""
    found = arguments.get(NEW)
    return arguments.get(OLD) if found is None else found


def renamed(arguments: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The arguments with the cache, if there is one, under only this name."""
    others = {key: value for key, value in arguments.items() if key not in NAMES}
    return others if len(others) == len(arguments) else others | {name: cache_in(arguments)}


@functools.cache
def of(function: Callable[..., Any]) -> str:
    """The name that a transformers function has for it."""
    return NEW if NEW in inspect.signature(function).parameters else OLD
