"""Which patches leave models alone that are not Gemma 4: read out of the code of their replacements, and measured.

tests/models/test_gates.py runs them on other models, and holds what is said here against what they do there.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import gemma4_compat

#: What tests/models/others_child.py wrote.
MEASURED = Path(__file__).resolve().parents[2] / "docs" / "other_models.json"
#: A model type or a class of the family, as :mod:`gemma4_compat._models.family` compares them.
_FAMILY = re.compile(r"[gG]emma4(?!_compat)\w*")
_MARK = "_gemma4_compat"


def for_every_model(patch: gemma4_compat.Patch) -> tuple[str, ...]:
    """The functions that a patch replaces for models of any kind; none of a patch for Gemma 4 alone.

    A replacement is for Gemma 4 alone where it replaces Gemma 4's own code, where it asks whether this is a Gemma 4,
    or where it looks for what a replacement of the same patch that asks has left for it; unless it was seen to act on
    another model all the same (docs/other_models.json). A patch that says itself what it acts on is for no other.
    """
    if patch.acts_on:
        return ()
    seen = json.loads(MEASURED.read_text(encoding="utf-8"))["acted"].get(patch.id, [])
    return tuple(str(target) for target in patch.targets if str(target) in {*seen, *_ungated(patch)})


def _ungated(patch: gemma4_compat.Patch) -> tuple[str, ...]:
    gated = [target for target in patch.targets if _is_gemma4s(target) or _asks(target.replacement)]
    others = [target for target in patch.targets if target not in gated]
    while found := [one for one in others if any(_marks(one.replacement) & _marks(by.replacement) for by in gated)]:
        gated += found
        others = [target for target in others if target not in found]
    return tuple(str(target) for target in others)


def _is_gemma4s(target: gemma4_compat.Target) -> bool:
    return target.module.startswith("transformers.models.gemma4")


def _asks(function: Callable[..., Any]) -> bool:
    """Whether a function, or one of this package that it calls, compares something with a name of the family."""
    return any(
        isinstance(value, str) and _FAMILY.fullmatch(value) for one in _called(function) for value in _said(one)
    )


def _said(function: FunctionType) -> Iterator[Any]:
    """The constants in a function's code, and those that it takes from its module."""
    yield from _constants(function.__code__)
    for name in _names(function.__code__):
        found = function.__globals__.get(name)
        yield from found if isinstance(found, (tuple, frozenset)) else [found]


@functools.cache
def _marks(function: Callable[..., Any]) -> frozenset[Any]:
    """What a function, or one that it calls, leaves for others or finds of theirs: by attribute, thread or context."""
    found = [one.__globals__.get(name) for one in _called(function) for name in _names(one.__code__)]
    names = {value for value in found if isinstance(value, str) and value.startswith(_MARK)}
    return frozenset(names | {id(value) for value in found if isinstance(value, (threading.local, ContextVar))})


@functools.cache
def _called(function: Callable[..., Any]) -> tuple[FunctionType, ...]:
    """A function, and every function of this package that it may call."""
    seen: dict[Any, None] = {}
    waiting: list[Any] = [function]
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen[one] = None
        waiting += vars(one).values() if inspect.isclass(one) else _mentioned(one)
        waiting = [value for value in waiting if isinstance(value, (FunctionType, type))]
    return tuple(one for one in seen if isinstance(one, FunctionType))


def _mentioned(function: FunctionType) -> Iterator[Any]:
    """The functions and classes of this package that a function's code names, those of its modules included."""
    names = set(_names(function.__code__))
    for name in names:
        found = function.__globals__.get(name)
        for value in [getattr(found, inner, None) for inner in names] if isinstance(found, ModuleType) else [found]:
            value = inspect.unwrap(value) if callable(value) else value
            if isinstance(value, (FunctionType, type)) and value.__module__.partition(".")[0] == "gemma4_compat":
                yield value


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _constants(code: CodeType) -> Iterator[Any]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _constants(constant)
        elif isinstance(constant, (tuple, frozenset)):
            yield from constant
        else:
            yield constant
