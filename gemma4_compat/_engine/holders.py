"""Holders of a function that was replaced after they took it: modules get the replacement, other objects are counted.

The count may take a search of the heap, so only ``doctor`` and ``gemma4_compat.status(unreached=True)`` ask for it.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from types import FrameType, FunctionType
from typing import Any

from gemma4_compat._engine import changes
from gemma4_compat._engine.changes import ChangeSet


def reach(edits: Iterable[ChangeSet | None]) -> None:
    """Give the replacements to modules that took a function before, under any name.

    The module that defines it is left out: even with the patch in place from the start, its own names would lead past
    the patch.
    """
    latest: dict[int, FunctionType] = {}
    for installed, original in (pair for one in edits if one is not None for pair in one.module_functions()):
        latest[id(original)] = installed
    if not latest or not _suspects([{changes.upstream(installed) for installed in latest.values()}])[0]:
        return
    for namespace in changes.modules():
        # A copy: building a list of the pairs may run a garbage collection, which may add names.
        for name, value in vars(namespace).copy().items():
            function = value
            while id(function) in latest and latest[id(function)].__module__ != namespace.__name__:
                function = latest[id(function)]  # one patch's replacement is another's original
            if function is not value:
                setattr(namespace, name, function)


def unreached(edits: Mapping[str, ChangeSet]) -> dict[str, int]:
    """How many objects hold a function that each of these replaced: they took it before, and call the original."""
    replaced = [one.replaced() for one in edits.values()]
    found = _holders(replaced)
    return {
        name: sum(not held.isdisjoint(map(id, functions)) for held in found)
        for name, functions in zip(edits, replaced)
    }


def _holders(sets: list[set[Any]]) -> list[set[int]]:
    """For each object that holds upstream functions of these sets: the ids of those that it holds.

    What the replacement itself needs is left out. The heap is searched once, and only if there are suspects.
    """
    suspects, ours = _suspects(sets)
    if not suspects:
        return []
    skipped = {id(item) for item in (*ours, suspects)}
    wanted = set(map(id, suspects))
    found = [
        item for item in gc.get_referrers(*suspects) if id(item) not in skipped and not isinstance(item, FrameType)
    ]
    passed = _arguments(found, wanted)
    return [wanted.intersection(map(id, gc.get_referents(item))) for item in found if id(item) not in passed]


def _suspects(sets: list[set[Any]]) -> tuple[list[Any], list[Any]]:
    """The upstream functions of these sets with more references than the replacement needs; and all objects
    whose references do not count.
    """
    functions = set().union(*sets)
    ours = [*sets, *changes.bookkeeping(functions)]
    ours += [cell for function in functions for cell in function.__closure__ or ()]  # it may call itself
    ours = list({id(item): item for item in ours}.values())
    own = Counter(map(id, gc.get_referents(*ours)))
    spare, *counts = [sys.getrefcount(item) for item in (lambda: None, *functions)]
    suspects = [function for function, count in zip(functions, counts) if count > spare + own[id(function)] + 1]
    return suspects, ours


def _arguments(found: list[Any], functions: set[int]) -> set[int]:
    """The tuples among these that are the arguments of a call, in whatever thread: nothing in the heap holds them.

    An installed function calls its replacement with the original and the arguments of its own call.
    """
    tuples = [item for item in found if isinstance(item, tuple) and item and id(item[0]) in functions]
    if not tuples:
        return set()
    holders = gc.get_referrers(*tuples)
    ours = {id(found), id(tuples), id(holders)}
    held = {
        id(part)
        for holder in holders
        if id(holder) not in ours and not isinstance(holder, FrameType)
        for part in gc.get_referents(holder)
    }
    return {id(item) for item in tuples} - held
