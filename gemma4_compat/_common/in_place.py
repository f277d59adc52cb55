"""A method of one object replaced for a time, without a trace afterwards, whatever else is replaced meanwhile."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

_ABSENT = object()
_lock = threading.RLock()


class _Method:
    """What stands in place of ``owner.name`` while anything replaces it."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.own = vars(owner).get(name, _ABSENT)
        self.layers: list[Callable[..., Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._under(tuple(self.layers))(*args, **kwargs)

    def _under(self, layers: tuple[Callable[..., Any], ...]) -> Callable[..., Any]:
        if layers:
            return functools.partial(layers[-1], self._under(layers[:-1]))
        if self.own is not _ABSENT:
            return self.own  # type: ignore[no-any-return]
        kind = type(self.owner)
        return inspect.getattr_static(kind, self.name).__get__(self.owner, kind)  # type: ignore[no-any-return]


@contextlib.contextmanager
def replaced(owner: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Inside, ``owner.name(...)`` is ``replacement(below, ...)``; ``below`` is the method without this replacement.

    Replacements of one method stack, the latest on top. They may end in any order, in any thread: each removes only
    itself, and after the last one the object is as it was.

    Args:
        owner: an object with a ``__dict__``, such as a module.
        name: of a method; it may be an attribute of the object itself.
        replacement: called with ``below`` first, then with the arguments of the call.

    Raises:
        AttributeError: the object has no such method.
    """
    getattr(owner, name)
    layer = functools.partial(replacement)  # equal to no other
    with _lock:
        method = vars(owner).get(name)
        if not isinstance(method, _Method):
            method = vars(owner)[name] = _Method(owner, name)
        method.layers.append(layer)
    try:
        yield
    finally:
        with _lock:
            method.layers.remove(layer)
            if not method.layers and vars(owner).get(name) is method:
                if method.own is _ABSENT:
                    del vars(owner)[name]
                else:
                    vars(owner)[name] = method.own
