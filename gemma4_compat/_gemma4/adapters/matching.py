"""Match settings of PEFT configurations with names of modules, with PEFT's own functions where they exist."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any


def targeted(config: Any, names: Iterable[str]) -> set[str]:
    """The names that PEFT would put an adapter on."""
    from peft.tuners import tuners_utils

    return {name for name in names if tuners_utils.check_target_module_exists(config, name)}


def is_excluded(config: Any, name: str) -> bool:
    """Whether ``exclude_modules`` keeps PEFT from adapting the module."""
    from peft.tuners import tuners_utils

    return type(tuners_utils.check_target_module_exists(config, name)).__name__ == "_ExcludedModule"


def pattern_for(patterns: Mapping[str, Any], name: str) -> str | None:
    """The key of a ``rank_pattern`` or ``alpha_pattern`` that PEFT uses for the module; None if none matches."""
    from peft.utils import other

    found: str = other.get_pattern_key(patterns.keys(), name)
    return found if found in patterns else None


def value_for(patterns: Mapping[str, Any], name: str) -> Any:
    """The value that PEFT finds in a ``rank_pattern`` or ``alpha_pattern`` for the module; None if none matches."""
    pattern = pattern_for(patterns, name)
    return None if pattern is None else patterns[pattern]


def names_module(names: Any, path: str) -> bool:
    """Whether ``names``, a regular expression or the ends of names, includes the module."""
    if isinstance(names, str):
        return re.fullmatch(names, path) is not None
    return any(f".{path}".endswith(f".{name}") for name in names)
