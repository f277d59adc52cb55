"""What was there before, and what differs now: objects, values, tensors.

Each is noted with a :data:`Source`: why a difference matters, and the name of what holds it.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

#: Why a difference matters, and the name of what holds it.
Source = tuple[Any, str]
_NOTHING = object()  # what is under a key that is not there
#: Values of these types are shown.
_SHOWN = (bool, int, float, str, type(None))
#: The attribute that says that transformers has put its hooks on a module that collect hidden states for who asks.
COLLECTED = "_output_capturing_hooks_installed"


@dataclass
class _Noted:
    """What was under each key of some dictionaries: the objects, their ids, or their values."""

    dicts: list[dict[Any, Any]] = field(default_factory=list)
    keys: list[Any] = field(default_factory=list)
    defaults: list[Any] = field(default_factory=list)
    found: list[Any] = field(default_factory=list)
    source: list[Source] = field(default_factory=list)
    shares: dict[int, _Noted] = field(default_factory=dict)

    def add(self, where: dict[Any, Any], key: Any, found: Any, source: Source, default: Any = _NOTHING) -> None:
        self.dicts.append(where)
        self.keys.append(key)
        self.defaults.append(default)
        self.found.append(found)
        self.source.append(source)

    def now(self) -> Iterator[Any]:
        """What is there now."""
        return map(dict.get, self.dicts, self.keys, self.defaults)

    def what(self) -> tuple[list[Any], list[Any], list[Source]]:
        """Keys, what was there, and sources."""
        return self.keys, self.found, self.source

    def share(self, turn: int, turns: int) -> _Noted:
        """A part of it; each has its turn. All is noted by then."""
        if turn not in self.shares:
            lists: Any = (self.dicts, self.keys, self.defaults, self.found, self.source)
            self.shares[turn] = _Noted(*(each[turn::turns] for each in lists))
        return self.shares[turn]


class Entries:
    """Which object is under each key of some dictionaries, and what is in some containers.

    Numbers, names and the like are kept alive, and compared as they are. Others are compared by their ids, in two
    passes over lists. Another object may get the id of one that was deleted, so deletions are noticed by weak
    references. Containers are neither watched nor kept, since they may check modules; a new one at the place of a
    deleted one would not be noticed.

    Args:
        keeps: who asks holds all these objects anyway: then all are compared as they are, which takes half as long.
    """

    def __init__(self, *, keeps: bool = False) -> None:
        self._keeps = keeps
        self._constants, self._others = _Noted(), _Noted()
        self._kept: list[Any] = []  # constants in containers
        self._references: list[weakref.ref[Any]] = []
        self._reference_sources: list[Source] = []
        self._gone: list[weakref.ref[Any]] = []  # of those, the ones whose object was deleted
        self._containers: list[Collection[Any]] = []
        self._contents: list[list[int]] = []
        self._content_sources: list[Source] = []
        self._sized: list[Collection[Any]] = []
        self._sizes: list[int] = []
        self._size_sources: list[Source] = []

    def add(self, where: dict[Any, Any], key: Any, source: Source) -> None:
        """Note what is under ``key`` now."""
        value = where.get(key, _NOTHING)
        if self._keeps or self._is_constant(value, source):
            self._constants.add(where, key, value, source)
        else:
            self._others.add(where, key, id(value), source)

    def add_size(self, where: Collection[Any], source: Source) -> None:
        """Note the number of keys of a dictionary whose keys are all noted: a new key changes it."""
        self._sized.append(where)
        self._sizes.append(_size(where))
        self._size_sources.append(source)

    def add_contents(self, container: Collection[Any], source: Source) -> None:
        """Note the items of a list, a set or a tuple, or the keys of a dictionary in their order."""
        if not container:
            self.add_size(container, source)
            return
        self._containers.append(container)
        self._contents.append(list(map(id, container)))
        self._kept += [value for value in container if self._is_constant(value, source)]
        self._content_sources.append(source)

    def _is_constant(self, value: Any, source: Source) -> bool:
        """Whether it is a number, a name, a dtype: nothing that holds a module. What can be watched is, otherwise."""
        if isinstance(value, (dict, list, tuple, set)):
            return False
        try:
            self._references.append(weakref.ref(value, self._gone.append))
        except TypeError:
            return True
        self._reference_sources.append(source)
        return False

    def check(self) -> bool:
        """Whether the same objects are there."""
        if self._gone:
            return False
        if list(map(len, self._sized)) != self._sizes and list(map(_size, self._sized)) != self._sizes:
            return False
        if not _are_same(self._constants, self._others):
            return False
        return [list(map(id, container)) for container in self._containers] == self._contents

    def check_rotating(self, turn: int, turns: int) -> bool:
        """Whether a share of the dictionaries' keys still has the same objects: each has its turn."""
        return not self._gone and _are_same(self._constants.share(turn, turns), self._others.share(turn, turns))

    def differences(self) -> Iterator[Source]:
        """What is another object now. If one was deleted and another has its place, only the holder is named."""
        yield from [*self._changed(), *self._resized()] or self._of_deleted()

    def _changed(self) -> Iterator[Source]:
        for now, key, old, source in zip(self._constants.now(), *self._constants.what()):
            if now is not old:
                values = f": {changed(old, now)}" if isinstance(old, _SHOWN) and isinstance(now, _SHOWN) else ""
                yield source[0], f"{under(key, source)[1]}{values}"
        for now, key, identity, source in zip(self._others.now(), *self._others.what()):
            if id(now) != identity:
                yield under(key, source)

    def _resized(self) -> Iterator[Source]:
        """What is new in dictionaries: :meth:`_changed` has what is no longer there. Other containers themselves."""
        for where, size, source in zip(self._sized, self._sizes, self._size_sources):
            if _size(where) > size:
                yield from _added([key for key in where if key != COLLECTED][size:], where, source)
        for container, contents, source in zip(self._containers, self._contents, self._content_sources):
            if list(map(id, container)) != contents:
                yield from _added([key for key in container if id(key) not in contents], container, source)

    def _of_deleted(self) -> Iterator[Source]:
        for reference in self._gone:
            yield self._reference_sources[self._references.index(reference)]


def under(key: Any, source: Source) -> Source:
    """The source of what is under a key that is a name; of others, such as the id of a hook, that of its holder."""
    return (source[0], f"{source[1]}.{key}") if isinstance(key, str) else source


def _added(keys: list[Any], where: Collection[Any], source: Source) -> Iterator[Source]:
    yield from [under(key, source) for key in keys if isinstance(where, dict)] or [source]


def _size(where: Collection[Any]) -> int:
    """How many keys or items, without :data:`COLLECTED`."""
    return len(where) - (isinstance(where, dict) and COLLECTED in where)


def _are_same(constants: _Noted, others: _Noted) -> bool:
    if not all(map(operator.is_, constants.now(), constants.found)):
        return False
    return list(map(id, others.now())) == others.found


class Values:
    """Which value is under each key of some dictionaries; one that is equal is the same."""

    def __init__(self) -> None:
        self._noted = _Noted()
        self.values = self._noted.found

    def add(self, where: dict[Any, Any], key: Any, source: Source, default: Any = None) -> None:
        """Note the value under ``key``: a number, a name, or a list of names, which is copied."""
        self._noted.add(where, key, _copied(where.get(key, default)), source, default)

    def check(self) -> bool:
        """Whether equal values are there."""
        return list(self._noted.now()) == self.values

    def now(self) -> list[Any]:
        """The values that are there now."""
        return list(map(_copied, self._noted.now()))

    def check_rotating(self, turn: int, turns: int) -> bool:
        """Whether a share of them is there: each has its turn."""
        share = self._noted.share(turn, turns)
        return list(share.now()) == share.found

    def differences(self) -> Iterator[Source]:
        """The values that differ, and how."""
        noted = self._noted
        for key, old, new, (cause, path) in zip(noted.keys, noted.found, noted.now(), noted.source):
            if old != new:
                yield cause, f"{path}.{key}: {changed(old, new)}"


def _copied(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value


class Layouts:
    """Where tensors are, and in which layout; of ``trained`` ones also whether they require a gradient."""

    def __init__(self, *, trained: bool = False) -> None:
        self._trained = trained
        self._references: list[weakref.ref[Any]] = []
        self._layouts: tuple[list[Any], ...] = self._look([])
        self._source: list[Source] = []

    def add(self, tensor: Any, source: Source) -> None:
        """Note a tensor; one that is not strided has no addresses to watch."""
        import torch

        if tensor.layout is torch.strided:
            self._references.append(weakref.ref(tensor))
            for noted, new in zip(self._layouts, self._look([tensor])):
                noted += new
            self._source.append(source)

    def tensors(self) -> list[Any]:
        """Those that are still there."""
        return [tensor for reference in self._references if (tensor := reference()) is not None]

    def check(self) -> bool:
        """Whether all are there, where and as they were."""
        found = [reference() for reference in self._references]
        return all(map(operator.is_not, found, itertools.repeat(None))) and self._look(found) == self._layouts

    def differences(self) -> Iterator[Source]:
        """Those that are gone or lie elsewhere or otherwise."""
        for reference, source, *noted in zip(self._references, self._source, *self._layouts):
            tensor = reference()
            if tensor is None or [one for (one,) in self._look([tensor])] != noted:
                yield source

    def _look(self, found: list[Any]) -> tuple[list[Any], ...]:
        """Addresses, strides, dtypes and shapes of tensors: as lists, which check less that is to be collected."""
        import torch

        names = ("dtype", "shape", "requires_grad") if self._trained else ("dtype", "shape")
        with torch._C.DisableTorchFunctionSubclass():
            reads = torch.Tensor.data_ptr, torch.Tensor.stride, *map(operator.attrgetter, names)
            return tuple(list(map(read, found)) for read in reads)


def changed(old: object, new: object) -> str:
    """``old -> new``, on one line."""
    return " -> ".join(f"{' '.join(str(value).split()):.60}" for value in (old, new))
