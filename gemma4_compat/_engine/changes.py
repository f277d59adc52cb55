"""A journal of edits to other people's namespaces, and their exact undo.

Hazards this file exists for:

* ``torch.compile`` silently drops ``wrapt.FunctionWrapper`` on module functions and methods, so what is installed is a
  plain function; ``functools.wraps`` with its default ``updated`` would also copy dynamo's marks, so it gets ``()``.
  Among what a function closes over, dynamo knows lists and functions; an object of a class of ours ends the graph.
* Undoing through ``getattr``/``setattr`` turns static methods into methods and leaves strays on subclasses. Only the
  raw slot, ``vars(owner)[name]``, is saved and restored.
* ``from x import f`` gave ``f`` to other modules. Every module that holds the same object gets the replacement; the
  undo finds the replacement wherever it went since. Other holders of ``f`` (registries, class attributes, closures,
  bound methods) keep it; :mod:`gemma4_compat._engine.holders` counts them.
* A flag that instances set, over a default in the class or none, becomes a property (:class:`Attribute`). What they
  set stays in their own namespaces: copies and pickles have it, and after the undo it is read from there again.
* Objects keep our function: a bound method (accelerate's ``module._old_forward``) outlives the undo. It becomes a
  pass-through, and the next installation puts the same function back, so that it works there again.
* A reload executes a module again, in the same namespace: its functions and classes are new. The old classes still
  have instances, and other modules still hold the old functions; these keep what was installed in them.
* Another library may wrap our replacement. Removing ours underneath would drop its wrapper, so the slot is left alone
  and our function becomes a pass-through, which the next installation switches on again in place.
* Tracebacks keep a single frame of ours: readers look for upstream's lines and their own.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from types import FunctionType, TracebackType
from typing import Any

from gemma4_compat._engine.fingerprint import VALUE


@dataclass(slots=True)  # what it refers to is counted
class _Switch:
    """What an installed function calls: the replacement, ``state[0]``; if that is None, the original.

    ``state[1]`` is what it calls as the original: what is dormant below it is passed over.
    """

    original: Any
    state: list[Any]
    changes: ChangeSet
    dormant: Callable[..., Any] | None = None  # the replacement, until `activate` puts it into `state`


_ABSENT = object()
_OURS = "__gemma4_compat__"  # on every function we install: the id of the patch
_PACKAGE = __name__.partition(".")[0]
# What we installed. The mark is not enough: a foreign functools.wraps around ours copies it. The switch is not an
# attribute of the function, because accelerate copies those, and models are deep-copied.
_installed: weakref.WeakKeyDictionary[FunctionType, _Switch] = weakref.WeakKeyDictionary()
# By patch and label, what was installed last: objects that kept it as a bound method get the repair again with the
# next install.
_latest: weakref.WeakValueDictionary[tuple[str, str], FunctionType] = weakref.WeakValueDictionary()
# See `dormant`: ids of patches that are needed; owner, name and previous object, where dormant functions were put.
_activated: set[str] = set()
_dormant_slots: dict[tuple[int, str], tuple[Any, str, Any]] = {}
_attributes: dict[tuple[type, str], Attribute] = {}  # by owner and name, one that changes nothing
_switching = threading.Lock()


@dataclass(frozen=True, slots=True)
class _Edit:
    owner: Any
    name: str
    before: Any  # the raw slot, or _ABSENT where the name was inherited or missing
    after: Any  # the raw object we put there
    label: str


class Attribute(property):
    """What instances read under a name: what they set, else the value in their class.

    Reading it from the class itself gives the value that was there before.
    """

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is not None:
            return super().__get__(instance, owner)
        (value,) = vars(upstream(self.fget))[VALUE]
        if value is _ABSENT:
            raise AttributeError(f"{getattr(owner, '__name__', owner)!s} has no such attribute")
        return value


def _attribute(owner: type, name: str, value: Any) -> Attribute:
    """One that changes nothing: the same one each time."""
    known = _attributes.get((owner, name))
    if known is not None and vars(known.fget)[VALUE][0] is value:
        return known

    def read(self: Any) -> Any:
        return self.__dict__.get(name, value)

    def read_own(self: Any) -> Any:
        if name not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self.__dict__[name]

    def write(self: Any, new: Any) -> None:
        self.__dict__[name] = new

    def delete(self: Any) -> None:
        if name not in self.__dict__:
            raise AttributeError(name)
        del self.__dict__[name]

    reader = read_own if value is _ABSENT else read
    vars(reader)[VALUE] = (value,)
    found = _attributes[owner, name] = Attribute(reader, write, delete)
    return found


class ChangeSet:
    """The edits of one patch. Not thread-safe: the engine uses it under its lock."""

    def __init__(self, patch_id: str) -> None:
        self.patch_id = patch_id
        self.active = True
        self._journal: list[_Edit] = []
        self._functions: list[tuple[FunctionType, Any]] = []  # module functions: (installed, original)
        self._wrappers: weakref.WeakSet[FunctionType] = weakref.WeakSet()  # the functions it installed
        self._labels: dict[str, bool] = {}  # the names it replaced, and whether they are attributes

    def replace(
        self,
        module: str,
        name: str,
        replacement: Callable[..., Any],
        *,
        dormant: bool = False,
        attribute: bool = False,
    ) -> None:
        """Put ``replacement(original, *args, **kwargs)`` in place of ``module.name`` (``name`` may be dotted).

        Static and class methods stay what they are; a property gets another getter. An ``attribute`` of instances (see
        :class:`Attribute`) is read by ``replacement(original, instance)``. With ``dormant``, the function
        that is put there calls the original until :func:`gemma4_compat._engine.dormant.activate`. A replacement of
        ``__getattr__`` in a class that has none may have an attribute ``known``, by class the names that it is asked
        for: any other is missing, without a call.

        Raises:
            AttributeError: nothing of that name is there.
            TypeError: what is there is not a function, a static method, a class method or a property.
        """
        owner, slot = resolve_owner(module, name)
        raw = raw_slot(owner, slot, attribute=attribute)
        label = f"{module}.{name}"
        self._labels[label] = attribute
        if (kept := beneath(raw, self.patch_id, label)) is not None and not _installed[kept].changes.active:
            self._switch_on(kept, replacement, dormant)
            self._journal.append(_Edit(owner, slot, raw, kept, label))
            if not isinstance(owner, type):
                self._functions.append((kept, _installed[kept].original))
            return
        if isinstance(raw, (staticmethod, classmethod)):
            installed: Any = type(raw)(self._wrap(raw.__func__, replacement, label, dormant))
        elif isinstance(raw, property):
            installed = raw.getter(self._wrap(raw.fget, replacement, label, dormant))
        else:
            installed = self._wrap(raw, replacement, label, dormant)
        before = vars(owner).get(slot, _ABSENT)
        if dormant and isinstance(owner, type) and not is_installed(function_of(raw)):
            _dormant_slots[id(owner), slot] = owner, slot, before
        if before is _ABSENT and isinstance(owner, type):
            # Inherited: otherwise it would be pickled under a name that leads to the base class's function.
            function = function_of(installed)
            function.__module__, function.__qualname__ = owner.__module__, f"{owner.__qualname__}.{slot}"
        self._set(owner, slot, before, installed, label)
        if isinstance(installed, FunctionType) and not isinstance(owner, type):
            self._functions.append((installed, raw))
            for namespace in modules():
                if vars(namespace).get(slot) is raw:
                    self._set(namespace, slot, raw, installed, f"{namespace.__name__}.{slot}")

    def is_lost(self, module: str, name: str) -> bool:
        """Whether ``module.name`` was redefined after it was replaced: nothing of this patch is in it or below it."""
        attribute = self._labels.get(f"{module}.{name}")
        if attribute is None:
            return False
        try:
            current = function_of(raw_slot(*resolve_owner(module, name), attribute=attribute))
        except (KeyError, AttributeError):
            return False
        while current not in self._wrappers:
            current = getattr(current, "__wrapped__", None)
            if current is None:
                return True
        return False

    def forget(self, module: str) -> None:
        """Forget edits of a reloaded module's namespace that are gone: there is nothing to undo."""
        namespace = sys.modules[module]
        self._journal = [
            edit
            for edit in self._journal
            if edit.owner is not namespace or vars(namespace).get(edit.name) is edit.after
        ]

    def _wrap(self, original: Any, replacement: Callable[..., Any], label: str, dormant: bool) -> FunctionType:
        if not isinstance(original, FunctionType):
            raise TypeError(f"{label} is a {type(original).__name__}, not a function")
        kept = _latest.get((self.patch_id, label))
        known = None if kept is None else _installed[kept]
        if kept is not None and known is not None and known.original is original and not known.changes.active:
            self._switch_on(kept, replacement, dormant)
            return kept
        state: list[Any] = [None, original]
        # An error is an answer there, which compilers trace.
        asked = label.endswith(".__getattr__") or VALUE in vars(upstream(original))
        known = vars(replacement).get("known") if original is missing else None

        @functools.wraps(original, updated=())
        def installed(*args: Any, **kwargs: Any) -> Any:
            now, inner = state
            if (
                known is not None
                and now is not None
                and type(args[0]) in known
                and args[1] not in known[type(args[0])]
            ):
                raise AttributeError(f"{type(args[0]).__name__!r} object has no attribute {args[1]!r}")
            try:
                return inner(*args, **kwargs) if now is None else now(inner, *args, **kwargs)
            except BaseException as error:  # broad: it goes on to the caller, without the frames between
                if asked or _from_upstream(error.__traceback__, original) is None:
                    raise
                # Not in a variable: this frame would hold the frames below it, and they hold it.
                raise error.with_traceback(_from_upstream(error.__traceback__, original))  # noqa: B904  # the same error

        vars(installed)[_OURS] = self.patch_id
        function: FunctionType = installed  # type: ignore[assignment]  # mypy sees _Wrapped; it is a plain function
        function.__defaults__, function.__kwdefaults__ = original.__defaults__, original.__kwdefaults__  # to be read
        if not label.endswith(".forward"):  # accelerate copies a forward's attributes to a bound one
            # For getfullargspec, which does not look below a wrapper.
            function.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
        _installed[function] = _Switch(original, state, self)
        _latest[self.patch_id, label] = function
        self._switch_on(function, replacement, dormant)
        return function

    def _switch_on(self, kept: FunctionType, replacement: Callable[..., Any], dormant: bool) -> None:
        known = _installed[kept]
        with _switching:
            known.changes = self
            if dormant and self.patch_id not in _activated:
                known.state[0], known.dormant = None, replacement
            else:
                known.state[0], known.dormant = replacement, None
        self._wrappers.add(kept)

    def _set(self, owner: Any, name: str, before: Any, after: Any, label: str) -> None:
        self._journal.append(_Edit(owner, name, before, after, label))
        setattr(owner, name, after)

    def overridden(self) -> tuple[str, ...]:
        """Labels of the slots where another library has wrapped, or replaced, what this installed."""
        return tuple(edit.label for edit in self._journal if not self._holds(vars(edit.owner).get(edit.name)))

    def _holds(self, raw: Any) -> bool:
        """Whether a slot holds one of these functions, with or without other patches of ours on top of it.

        It need not be the function of an edit: after two reloads, the second module has the function that was
        installed in the first.
        """
        current = function_of(raw)
        while current not in self._wrappers:
            if not isinstance(current, FunctionType) or current not in _installed:
                return False
            current = vars(current)["__wrapped__"]
        return True

    def replaced(self) -> set[Any]:
        """The upstream functions below those it installed, except the ones that a base class keeps."""
        inherited = {function_of(edit.after) for edit in self._journal if edit.before is _ABSENT}
        return {upstream(function) for function in self._wrappers if function not in inherited}

    def module_functions(self) -> list[tuple[FunctionType, Any]]:
        """The module functions that it replaced, as (installed, original)."""
        return self._functions

    def undo(self, elsewhere: list[tuple[FunctionType, Any]] | None = None) -> tuple[str, ...]:
        """Restore every raw slot, newest first. Returns the labels of the slots that another library has taken.

        Other modules may have taken our functions since. They are all searched now or, if a list is given, when the
        caller passes it to :func:`restore`: a search takes tens of milliseconds, however much is undone.
        """
        with _switching:
            self.active = False
            for switch in [_installed[function] for function in self._wrappers]:
                if switch.changes is self:
                    switch.state[0] = switch.dormant = None
        left: list[str] = []
        for edit in reversed(self._journal):
            current = vars(edit.owner).get(edit.name)
            if current is not edit.after:
                if isinstance(edit.owner, type) or not self._holds(current):  # a module's slot: see restore
                    left.append(edit.label)
            elif edit.before is _ABSENT:
                delattr(edit.owner, edit.name)
            else:
                setattr(edit.owner, edit.name, edit.before)
        if elsewhere is None:
            restore(self._functions)
        else:
            elsewhere += self._functions
        self._journal.clear()
        self._functions.clear()
        return tuple(left)


def bookkeeping(functions: Collection[Any]) -> list[Any]:
    """The objects that refer to these upstream functions only because they are replaced; the undo needs them."""
    ours: list[Any] = []
    for installed, switch in list(_installed.items()):
        if upstream(installed) in functions:
            ours += [*(installed.__closure__ or ()), vars(installed), switch, switch.state]
            ours += [item for pair in ((edit, edit.before) for edit in switch.changes._journal) for item in pair]
            ours += switch.changes._functions
    ours += _attributes.values()
    ours += [vars(item) for item in ours if isinstance(item, (staticmethod, classmethod))]
    return list({id(item): item for item in ours if not isinstance(item, FunctionType)}.values())


def restore(functions: list[tuple[FunctionType, Any]]) -> None:
    """For each pair (installed, original): where a module holds the first, put the second."""
    originals = {id(installed): original for installed, original in functions}
    for namespace in modules() if originals else ():
        if originals.keys().isdisjoint(map(id, list(vars(namespace).values()))):
            continue  # all but a few of thousands
        for name, value in vars(namespace).copy().items():
            original = value
            while id(original) in originals:  # one patch's original is another's replacement
                original = originals[id(original)]
            if original is not value:
                setattr(namespace, name, original)


def function_of(raw: Any) -> Any:
    """The function in a raw slot: a static or class method's, a property's getter, or what is there itself."""
    return raw.fget if isinstance(raw, property) else getattr(raw, "__func__", raw)


def is_installed(function: Any) -> bool:
    """Whether a patch, applied or undone, has put this function somewhere."""
    return type(function) is FunctionType and function in _installed  # a proxy, such as wrapt's, says it is one


def is_on(function: Any, patch_id: str | None = None) -> bool:
    """Whether an applied patch (this one, or any) has installed this function, or a function that it wraps."""
    seen: set[int] = set()
    while function is not None and id(function) not in seen:
        wanted = is_installed(function) and patch_id in (None, vars(function)[_OURS])
        if wanted and _installed[function].changes.active:
            return True
        seen.add(id(function))
        function = getattr(function, "__wrapped__", None)
    return False


def beneath(raw: Any, patch_id: str, label: str) -> FunctionType | None:
    """What a patch last put in place of ``label``, if a raw slot holds it, also below wrappers of others."""
    kept = _latest.get((patch_id, label))
    current = function_of(raw)
    seen = set()
    while current is not None and current is not kept and id(current) not in seen:
        seen.add(id(current))
        current = getattr(current, "__wrapped__", None)
    return kept if current is kept else None


def upstream(function: Any) -> Any:
    """The function below all those that patches put on top of it."""
    while is_installed(function):
        function = _installed[function].original
    return function


def _from_upstream(traceback: TracebackType | None, original: Any) -> TracebackType | None:
    """A traceback from upstream's function on; None if it does not lead there through this package's frames only."""
    code = upstream(original).__code__  # read now: autoreload replaces it
    while traceback is not None and traceback.tb_frame.f_code is not code:
        if str(traceback.tb_frame.f_globals.get("__name__")).partition(".")[0] != _PACKAGE:
            return None
        traceback = traceback.tb_next
    return traceback


def resolve_owner(module: str, name: str) -> tuple[Any, str]:
    """The object whose namespace holds the last part of the dotted ``name``, and that last part."""
    owner: Any = sys.modules[module]  # re-read: transformers' lazy modules replace their entry while they load
    *path, attribute = name.split(".")
    for part in path:
        owner = vars(owner)[part] if part in vars(owner) else getattr(owner, part)
    return owner, attribute


def raw_slot(owner: Any, name: str, *, attribute: bool = False) -> Any:
    """What ``owner`` (or, for a class, the first base that has it) holds under ``name``, without calling descriptors.

    For a class without a ``__getattr__`` that is :func:`missing`. An ``attribute`` of instances is always an
    :class:`Attribute`, whether the class has a value or not.

    Raises:
        AttributeError: there is no such name.
    """
    found = _ABSENT
    for namespace in owner.__mro__ if isinstance(owner, type) else (owner,):
        if name in vars(namespace):
            found = vars(namespace)[name]
            break
    if attribute:
        return found if isinstance(found, Attribute) else _attribute(owner, name, found)
    if found is not _ABSENT:
        return found
    if isinstance(owner, type) and name == "__getattr__":
        return missing
    raise AttributeError(f"{getattr(owner, '__name__', owner)!s} has no attribute {name!r}")


def missing(self: Any, name: str) -> Any:
    """A ``__getattr__`` that changes nothing: it raises again what was raised when ``name`` was read."""
    return type(self).__getattribute__(self, name)  # type: ignore[call-arg]  # mypy takes it for bound


def modules() -> Iterator[Any]:
    """Everything in sys.modules that really is a module, without placeholders and proxies."""
    for module in list(sys.modules.values()):
        if isinstance(module, type(sys)):
            yield module


def upstream_of(function: Any) -> FunctionType | None:
    """The function below those that patches installed; None if no patch installed this function."""
    found = None
    while isinstance(function, FunctionType) and function in _installed:
        found = function = _installed[function].original
    return found
