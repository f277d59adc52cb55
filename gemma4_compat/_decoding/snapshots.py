"""What was there when a step was captured, and what differs now: objects, values, tensors.

Each is noted with the cause and the name that :mod:`recaptures` tells if it differs.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Collection, Iterator
from typing import Any

from gemma4_compat._decoding import recaptures
from gemma4_compat._decoding.recaptures import Cause, changed

#: Why a difference matters, and the name of what holds it.
Whose = tuple[Cause, str]
_NOTHING = object()  # what is under a key that is not there


class Entries:
    """Which object is under each key of some dictionaries, and what is in some containers.

    Objects are compared by their ids, in two passes over lists. Another object may get the id of one that was deleted,
    so deletions are noticed by weak references. Numbers, names and the like have none, and are kept alive.
    Containers are neither watched nor kept, since they may hold modules; a new one at the place of a deleted one would
    not be noticed.
    """

    def __init__(self) -> None:
        self._dicts: list[dict[Any, Any]] = []
        self._keys: list[Any] = []
        self._ids: list[int] = []
        self._whose: list[Whose] = []
        self._constants: list[Any] = []
        self._references: list[weakref.ref[Any]] = []
        self._whose_references: list[Whose] = []
        self._gone: list[weakref.ref[Any]] = []  # of those, the ones whose object was deleted
        self._containers: list[Collection[Any]] = []
        self._contents: list[list[int]] = []
        self._whose_contents: list[Whose] = []
        self._sized: list[dict[Any, Any]] = []
        self._sizes: list[int] = []
        self._whose_sizes: list[Whose] = []
        self._shares: dict[int, tuple[list[Any], list[Any], list[int]]] = {}  # of some_hold: all is noted by then

    def add(self, where: dict[Any, Any], key: Any, whose: Whose) -> None:
        """Note what is under ``key`` now."""
        self._dicts.append(where)
        self._keys.append(key)
        self._ids.append(self._noted(where.get(key, _NOTHING), whose))
        self._whose.append(whose)

    def add_size(self, where: dict[Any, Any], whose: Whose) -> None:
        """Note the number of keys of a dictionary whose keys are all noted: a new key changes it."""
        self._sized.append(where)
        self._sizes.append(len(where))
        self._whose_sizes.append(whose)

    def add_contents(self, container: Collection[Any], whose: Whose) -> None:
        """Note the items of a list, a set or a tuple, or the keys of a dictionary in their order."""
        self._containers.append(container)
        self._contents.append([self._noted(value, whose) for value in container])
        self._whose_contents.append(whose)

    def _noted(self, value: Any, whose: Whose) -> int:
        if not isinstance(value, (dict, list, tuple, set)):
            try:
                self._references.append(weakref.ref(value, self._gone.append))
                self._whose_references.append(whose)
            except TypeError:  # a number, a name, a dtype: nothing that holds a module
                self._constants.append(value)
        return id(value)

    def hold(self) -> bool:
        """Whether the same objects are there."""
        if self._gone or list(map(len, self._sized)) != self._sizes:
            return False
        if list(map(id, map(dict.get, self._dicts, self._keys, itertools.repeat(_NOTHING)))) != self._ids:
            return False
        return [list(map(id, container)) for container in self._containers] == self._contents

    def some_hold(self, turn: int, turns: int) -> bool:
        """Whether a share of the dictionaries' keys still has the same objects: each has its turn."""
        if self._gone:
            return False
        if turn not in self._shares:
            self._shares[turn] = (self._dicts[turn::turns], self._keys[turn::turns], self._ids[turn::turns])
        dicts, keys, ids = self._shares[turn]
        return list(map(id, map(dict.get, dicts, keys, itertools.repeat(_NOTHING)))) == ids

    def differences(self) -> Iterator[Whose]:
        """What is another object now. If one was deleted and another has its place, only the holder is named."""
        yield from recaptures.first(self._others(), self._resized(), self._of_deleted())

    def _others(self) -> Iterator[Whose]:
        for where, key, noted, (cause, path) in zip(self._dicts, self._keys, self._ids, self._whose):
            if id(where.get(key, _NOTHING)) != noted:
                yield cause, f"{path}.{key}"

    def _resized(self) -> Iterator[Whose]:
        for where, size, whose in zip(self._sized, self._sizes, self._whose_sizes):
            if len(where) != size:
                yield whose
        for container, contents, whose in zip(self._containers, self._contents, self._whose_contents):
            if list(map(id, container)) != contents:
                yield whose

    def _of_deleted(self) -> Iterator[Whose]:
        for reference in self._gone:
            yield self._whose_references[self._references.index(reference)]


class Values:
    """Which value is under each key of some dictionaries; one that is equal is the same."""

    def __init__(self) -> None:
        self._dicts: list[dict[Any, Any]] = []
        self._keys: list[Any] = []
        self.values: list[Any] = []
        self._defaults: list[Any] = []
        self._shares: dict[int, list[list[Any]]] = {}
        self._whose: list[Whose] = []

    def add(self, where: dict[Any, Any], key: Any, whose: Whose, default: Any = None) -> None:
        """Note the value under ``key``: a number, a name, or a list of names, which is copied."""
        self._dicts.append(where)
        self._keys.append(key)
        self._defaults.append(default)
        self._whose.append(whose)
        value = where.get(key, default)
        self.values.append(list(value) if isinstance(value, list) else value)

    def hold(self) -> bool:
        """Whether equal values are there."""
        return list(map(dict.get, self._dicts, self._keys, self._defaults)) == self.values

    def some_hold(self, turn: int, turns: int) -> bool:
        """Whether a share of them is there: each has its turn."""
        if turn not in self._shares:
            self._shares[turn] = [each[turn::turns] for each in (self._dicts, self._keys, self._defaults, self.values)]
        dicts, keys, defaults, values = self._shares[turn]
        return list(map(dict.get, dicts, keys, defaults)) == values

    def differences(self) -> Iterator[Whose]:
        """The values that differ, and how."""
        now = map(dict.get, self._dicts, self._keys, self._defaults)
        for key, old, new, (cause, path) in zip(self._keys, self.values, now, self._whose):
            if old != new:
                yield cause, f"{path}.{key}: {changed(old, new)}"


class Layouts:
    """Where tensors are, and in which layout."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[Any]] = []
        self._layouts: list[Any] = []
        self._whose: list[Whose] = []

    def add(self, tensor: Any, whose: Whose) -> None:
        """Note a tensor; one that is not strided has no addresses to watch."""
        import torch

        if tensor.layout is torch.strided:
            self._references.append(weakref.ref(tensor))
            self._layouts += _layouts([tensor])
            self._whose.append(whose)

    def hold(self) -> bool:
        """Whether all are there, where and as they were."""
        found = [reference() for reference in self._references]
        return all(map(operator.is_not, found, itertools.repeat(None))) and _layouts(found) == self._layouts

    def differences(self) -> Iterator[Whose]:
        """Those that are gone or lie elsewhere or otherwise."""
        for reference, noted, whose in zip(self._references, self._layouts, self._whose):
            tensor = reference()
            if tensor is None or _layouts([tensor]) != [noted]:
                yield whose


def _layouts(found: list[Any]) -> list[Any]:
    import torch

    kind = torch.Tensor
    with torch._C.DisableTorchFunctionSubclass():
        places, strides = map(kind.data_ptr, found), map(kind.stride, found)
        return list(zip(places, strides, map(operator.attrgetter("dtype", "shape"), found)))
