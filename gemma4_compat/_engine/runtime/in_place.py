"""A method, an attribute or a variable replaced, without a trace afterwards, whatever else is replaced meanwhile.

Replacements of one name stack, the latest on top. They may end in any order, in any thread: each removes only itself,
and after the last one the object is as it was. What others put there meanwhile stays.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

_Value = TypeVar("_Value")


class ABSENT:
    """For :func:`assigned`: no attribute of that name. A class, because copies and pickles keep its identity."""


class _Layer:
    """One replacement of a method; ``lasting``: until :func:`restore`."""

    def __init__(self, replacement: Callable[..., Any], *, lasting: bool) -> None:
        self.replacement, self.lasting = replacement, lasting

    @property
    def function(self) -> Any:
        return getattr(self.replacement, "func", self.replacement)


_lock = threading.RLock()


class _Method(functools.partial[Any]):
    """What stands in place of ``owner.name`` while anything replaces it: a call goes straight to the top replacement.

    A deep copy of the owner has the lasting replacements, for the copy. A pickle has the owner's own method.
    """

    owner: Any
    name: str
    own: Any
    layers: list[_Layer]

    @classmethod
    def over(cls, owner: Any, name: str, own: Any) -> _Method:
        """In place of ``owner.name``, with nothing on it yet. ``own``: an attribute of the object itself."""
        made = cls(_nothing)
        made.owner, made.name, made.own, made.layers = owner, name, own, []
        names = ("__name__", "__qualname__", "__doc__")  # accelerate reads the first one
        functools.update_wrapper(made, getattr(type(owner), name, own), assigned=names, updated=())
        del vars(made)["__wrapped__"]
        return made.composed()

    def composed(self) -> _Method:
        """Call what lies here now."""
        # Not a method of this object: that would be a circle, which keeps the owner until the garbage collector comes.
        below: Callable[..., Any] = functools.partial(_bottom, self.owner, self.name, self.own)
        for layer in self.layers:
            below = functools.partial(layer.replacement, below)
        state: tuple[Any, ...] = (below, (), {}, vars(self))
        self.__setstate__(state)  # type: ignore[attr-defined]  # somebody may hold this object: it stays the same one
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> _Method:
        made = _Method.over(copy.deepcopy(self.owner, memo), self.name, copy.deepcopy(self.own, memo))
        made.layers = [
            _Layer(copy.deepcopy(layer.replacement, memo), lasting=True) for layer in self.layers if layer.lasting
        ]
        return made.composed()

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        return (getattr, (self.owner, self.name)) if self.own is ABSENT else (functools.partial, (self.own,))


def _nothing() -> None:
    pass


def _bottom(owner: Any, name: str, own: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The method that nothing replaces: of the object itself, or of its class as that is now."""
    if own is not ABSENT:
        return own(*args, **kwargs)
    kind = type(owner)
    return inspect.getattr_static(kind, name).__get__(owner, kind)(*args, **kwargs)


def _method(owner: Any, name: str) -> _Method | None:
    """What replaces the method; None if nothing does. In a shallow copy it is the original's."""
    found = vars(owner).get(name)
    return found if isinstance(found, _Method) and found.owner is owner else None


def _put(owner: Any, name: str, layer: _Layer) -> _Method:
    getattr(owner, name)
    method = _method(owner, name)
    if method is None:
        method = vars(owner)[name] = _Method.over(owner, name, vars(owner).get(name, ABSENT))
    method.layers.append(layer)
    return method.composed()


def _take_out(method: _Method, layer: _Layer) -> None:
    method.layers.remove(layer)
    method.composed()
    if not method.layers and vars(method.owner).get(method.name) is method:
        _set(method.owner, method.name, method.own)


def _set(owner: Any, name: str, value: Any) -> None:
    if value is ABSENT:
        vars(owner).pop(name, None)
    else:
        vars(owner)[name] = value


@contextlib.contextmanager
def replaced(owner: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Inside, ``owner.name(...)`` is ``replacement(below, ...)``; ``below`` is the method without this replacement.

    Args:
        owner: an object with a ``__dict__``, such as a module.
        name: of a method; it may be an attribute of the object itself.
        replacement: called with ``below`` first, then with the arguments of the call.

    Raises:
        AttributeError: the object has no such method.
    """
    layer = _Layer(replacement, lasting=False)
    with _lock:
        method = _put(owner, name, layer)
    try:
        yield
    finally:
        with _lock:
            _take_out(method, layer)


def replace(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """The same until :func:`restore`. A replacement by the same function takes the place of an earlier one.

    Args:
        owner: an object with a ``__dict__``, such as a module.
        name: of a method; it may be an attribute of the object itself.
        replacement: a function, or a partial of one, called with ``below`` first, then with the arguments of the call.
            A partial that has the owner has the copy in a deep copy of the owner.

    Raises:
        AttributeError: the object has no such method.
    """
    layer = _Layer(replacement, lasting=True)
    with _lock:
        restore(owner, name, layer.function)
        _put(owner, name, layer)


def restore(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Undo a :func:`replace` by this function. Does nothing where it replaces nothing."""
    with _lock:
        method = _method(owner, name)
        if method is not None:
            for layer in [one for one in method.layers if one.lasting and one.function is function]:
                _take_out(method, layer)


def replacements(value: Any) -> list[Callable[..., Any]]:
    """The functions that replace a method, the lowest first, of what is in the place of the method; else none."""
    return [layer.function for layer in value.layers] if isinstance(value, _Method) else []


def replacement(value: Any, function: Callable[..., Any]) -> Callable[..., Any] | None:
    """What replaces a method by this function, as it was given to :func:`replace`; None if nothing does."""
    layers = value.layers if isinstance(value, _Method) else []
    return next((layer.replacement for layer in layers if layer.function is function), None)


def own(owner: Any, name: str) -> Any:
    """The object's own attribute of that name, without what replaces it; :data:`ABSENT` if it has none."""
    method = _method(owner, name)
    return vars(owner).get(name, ABSENT) if method is None else method.own


class _Attribute:
    """An attribute while anything is :func:`assigned` to it."""

    def __init__(self, owner: Any, own: Any) -> None:
        self.owner, self.own = owner, own  # the owner stays: its id is a key
        self.values: dict[object, Any] = {}

    def top(self) -> Any:
        return next(reversed(self.values.values()), self.own)


_attributes: dict[tuple[int, str], _Attribute] = {}


@contextlib.contextmanager
def assigned(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, the object's own attribute ``name`` is ``value``; with :data:`ABSENT` it has none.

    Args:
        owner: an object with a ``__dict__``, such as a module.
        name: of an attribute of the object itself, there or not.
        value: anything.
    """
    key, place = (id(owner), name), object()
    with _lock:
        attribute = _attributes.setdefault(key, _Attribute(owner, vars(owner).get(name, ABSENT)))
        attribute.values[place] = value
        _set(owner, name, value)
    try:
        yield
    finally:
        with _lock:
            ours = vars(owner).get(name, ABSENT) is attribute.top()
            del attribute.values[place]
            if ours:
                _set(owner, name, attribute.top())
            if not attribute.values:
                del _attributes[key]


@contextlib.contextmanager
def bound(variable: ContextVar[_Value], value: _Value) -> Iterator[None]:
    """Inside, a context variable has this value, only in this thread (and task)."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextlib.contextmanager
def here(local: threading.local, **values: Any) -> Iterator[None]:
    """Inside, what a module keeps for each thread has these attributes in this thread, and as before otherwise."""
    before = dict(vars(local))
    vars(local).update(values)
    try:
        yield
    finally:
        vars(local).clear()
        vars(local).update(before)
