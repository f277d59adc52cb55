"""Redirect PEFT configurations from Gemma 4's clipped linears to the inner ``.linear``, which PEFT can adapt."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterable
from typing import Any

from gemma4_compat._gemma4.adapters import matching
from gemma4_compat._gemma4.adapters.translation import INNER
from gemma4_compat._gemma4.models import family, walk


def redirect(config: Any, model: Any) -> None:
    """Rewrite ``config`` in place to target the inner layer of every clipped linear that it matches.

    Args:
        config: a PEFT config with ``target_modules`` set (names or regular expression).
        model: the model it will be applied to, without PEFT's prefix.
    """
    matched = matched_wrappers(config, model)
    if not matched:
        return
    names = [name for name, _ in model.named_modules() if name]
    inner = {f"{name}.{INNER}" for name in matched if not matching.is_excluded(config, f"{name}.{INNER}")}
    wanted = matching.targeted(config, names) - set(matched) | inner

    compact = copy.copy(config)
    compact.target_modules = _with_inner(config.target_modules, matched)
    compact.exclude_modules = _excluding(getattr(config, "exclude_modules", None), matched)
    saved = {field.name for field in dataclasses.fields(config)}  # not other attributes
    if "exclude_modules" in saved and matching.targeted(compact, names) == wanted:
        config.target_modules, config.exclude_modules = compact.target_modules, compact.exclude_modules
    else:  # a tuner without exclusions, or a pattern that cannot be extended (it ends in a look-around)
        config.target_modules = wanted
    for attribute in ("rank_pattern", "alpha_pattern"):
        if patterns := getattr(config, attribute, None):
            setattr(config, attribute, _patterns_with_inner(patterns, matched))
    if feedforward := getattr(config, "feedforward_modules", None):
        config.feedforward_modules = _with_inner(feedforward, matched)


def matched_wrappers(config: Any, model: Any) -> list[str]:
    """Names of the clipped linears that ``config`` targets."""
    wrappers = [name for name, module in walk.named_modules(model) if is_wrapper(module)]
    found = matching.targeted(config, wrappers)
    return [name for name in wrappers if name in found]


def is_wrapper(module: Any) -> bool:
    """Whether this is a clipped linear (with one inner layer) of any Gemma 4 class."""
    named = family.is_gemma4_module(module) and type(module).__name__.endswith("ClippableLinear")
    return named and INNER in getattr(module, "_modules", {})


def _with_inner(targets: Any, matched: Iterable[str]) -> Any:
    """Targets that also match the inner layers of ``matched``."""
    if isinstance(targets, str):
        flags, pattern = _split_flags(targets)
        return rf"{flags}(?:{pattern})(?:\.{INNER})?"
    added = {name for name in targets if any(key == name or key.endswith(f".{name}") for key in matched)}
    return set(targets) | {f"{name}.{INNER}" for name in added}


def _excluding(excluded: Any, matched: Iterable[str]) -> str:
    """A regular expression for everything that ``excluded`` (names, pattern or None) and ``matched`` cover."""
    flags, patterns = "", []
    if isinstance(excluded, str):
        flags, pattern = _split_flags(excluded)
        patterns = [pattern]
    elif excluded:
        patterns = [rf"(?:.*\.)?{re.escape(name)}" for name in sorted(excluded)]
    by_tower: dict[str, set[str]] = {}
    for name in matched:
        parts = name.split(".")
        by_tower.setdefault(".".join(parts[:2]), set()).add(parts[-1])
    for tower, names in sorted(by_tower.items()):
        patterns.append(rf"{re.escape(tower)}\..*\.(?:{'|'.join(sorted(names))})")
    return flags + "|".join(f"(?:{pattern})" for pattern in patterns)


def _split_flags(pattern: str) -> tuple[str, str]:
    """Split off inline flags such as ``(?i)``, which may only be at the start of an expression."""
    flags = re.match(r"\(\?[aiLmsux]+\)", pattern)
    return (flags.group(), pattern[flags.end() :]) if flags else ("", pattern)


def _patterns_with_inner(patterns: dict[str, Any], matched: list[str]) -> dict[str, Any]:
    """``patterns`` that give an inner layer its wrapper's value, in the same order (the first match counts)."""
    used = {matching.pattern_for(patterns, name) for name in matched}
    extended: dict[str, Any] = {}
    for pattern, value in patterns.items():
        extended[pattern] = value
        if pattern in used:
            extended.setdefault(rf"(?:{pattern})\.{INNER}", value)
    exact: dict[str, Any] = {}  # for patterns that cannot be extended, such as those that end in $
    for name in matched:
        wanted = matching.value_for(patterns, name)
        if wanted is not None and matching.value_for(extended, f"{name}.{INNER}") != wanted:
            exact[re.escape(f"{name}.{INNER}")] = wanted
    return exact | extended
