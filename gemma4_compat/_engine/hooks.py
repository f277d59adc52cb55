"""Call somebody once a module is completely imported. The only file that imports wrapt.

Hazards this file exists for:

* A hook registered while its module is half imported fires at once, on the half-built module. Such a module is put off
  until the import that it is in has ended: see :func:`_at_end`.
* A hook registered while its module is being searched for, by another thread, is never called by wrapt. Such a module
  is noticed at the next import of anything: see :class:`_Finder`.
* An exception in a post-import hook makes the user's import fail, and the second import succeeds unpatched, for wrapt
  calls a hook once. Here it is called by the second import, too.
* ``importlib.reload`` (and Jupyter's autoreload, which calls it) executes a module again; wrapt calls no hook then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import wrapt

#: ``callback(name, own)``: ``own`` where the import of the module is what is going on: what is raised makes it fail.
Callback = Callable[[str, bool], None]


def when_imported(name: str, callback: Callback) -> None:
    """Call ``callback`` at the end of the import of the module ``name``, and whenever it is reloaded.

    Not when it is imported already: the caller looks, and says so (:func:`seen`).
    """
    registering, waits = True, False

    def fire(_module: Any) -> None:
        # The module handed over is not used: the entry in sys.modules may have been replaced while it loaded.
        nonlocal waits
        if registering:
            waits = _at_end(name, callback)
            return
        try:
            callback(name, True)
        except BaseException:  # the import fails, and will be tried again
            _finder.again(name, callback)
            raise

    wrapt.register_post_import_hook(fire, name)
    registering = False
    # After wrapt, so that it is asked before wrapt's finder.
    _finder.add(name, callback, unasked=not waits)


def seen(name: str) -> None:
    """The caller of :func:`when_imported` has found the module imported."""
    _finder.seen(name)


def is_initializing(name: str) -> bool:
    """Whether the module is in sys.modules but its body is still being executed."""
    return bool(getattr(_spec(name), "_initializing", False))


def is_imported(name: str) -> bool:
    """Whether the module is in sys.modules and its body has been executed."""
    return sys.modules.get(name) is not None and not is_initializing(name)


def is_absent(name: str) -> bool:
    """Whether a module does not exist, as far as the packages around it that are imported can tell.

    Imports nothing. Only the file system is asked: wrapt's finder, asked for a module that another thread imports just
    then, would not call that module's hook.
    """
    package, _, rest = name.partition(".")
    while rest and is_imported(package):
        part, _, rest = rest.partition(".")
        parent, package = sys.modules[package], f"{package}.{part}"
        if package not in sys.modules and isinstance(parent, ModuleType):
            path = vars(parent).get("__path__")  # None: what was a package is a module now
            return path is None or PathFinder.find_spec(package, path) is None
    return False


def _spec(name: str) -> Any:
    return getattr(sys.modules.get(name), "__spec__", None)


def _at_end(name: str, callback: Callback) -> bool:
    """Call ``callback`` when the import ends that the module is in; False where it is in none.

    The import machinery says in the module's spec that it has ended, whether or not it failed, and until then the spec
    has a class that hears it. That is inside the import: the module is still locked, and what ``callback`` raises is
    raised by this import and no other.
    """
    spec = _spec(name)
    if not isinstance(spec, ModuleSpec) or not is_initializing(name):
        return False
    kind: Any = type(spec)

    def ended(self: Any, value: bool) -> None:
        self.__class__ = kind
        try:
            self._initializing = value  # may be heard by somebody else, too
        finally:
            _ended(name, callback)

    heard = property(lambda self: vars(self)["_initializing"], ended)
    listening: Any = type(kind.__name__, (kind,), {"_initializing": heard})
    spec.__class__ = listening
    if vars(spec)["_initializing"] or type(spec) is not listening:
        return True
    spec.__class__ = kind  # another thread's import has ended since it was asked
    return False


def _ended(name: str, callback: Callback) -> None:
    """The import that a module was in has ended."""
    if name not in sys.modules:  # it failed
        _finder.again(name, callback)
        return
    try:
        callback(name, True)
    except BaseException:  # so it fails: leave what a module whose own code raises leaves
        del sys.modules[name]
        _finder.again(name, callback)
        raise


class _Finder:
    """A meta path entry, asked before wrapt's finder, that finds nothing new; being asked is how it notices things.

    Of a search for a module that is there: it is reloaded. Of one for a module whose import failed: wrapt needs the
    hook once more. Of one for anything else: whether a module is there by now that it was never asked about.
    """

    def __init__(self) -> None:
        self._callbacks: dict[str, list[Callback]] = {}
        self._unasked: dict[str, list[Callback]] = {}
        self._again: dict[str, list[Callback]] = {}

    def add(self, name: str, callback: Callback, *, unasked: bool) -> None:
        callbacks = self._callbacks.setdefault(name, [])
        if callback not in callbacks:
            callbacks.append(callback)
        if unasked:
            self._unasked.setdefault(name, []).append(callback)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def again(self, name: str, callback: Callback) -> None:
        self._again.setdefault(name, []).append(callback)

    def seen(self, name: str) -> None:
        self._unasked.pop(name, None)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if target is not None:
            return self._reloaded(fullname, path, target) if fullname in self._callbacks else None
        for callback in self._again.pop(fullname, ()):
            when_imported(fullname, callback)
        self._unasked.pop(fullname, None)  # wrapt's finder is next
        for name in list(self._unasked):
            if name in sys.modules:
                self._missed(name)
        return None

    def _missed(self, name: str) -> None:
        """A module whose hook wrapt will not call: it was being searched for when the hook was registered."""
        if sys.modules.get(name) is None:  # None: its import is blocked
            return
        waiting = [callback for callback in self._unasked.pop(name, ()) if not _at_end(name, callback)]
        if waiting and is_initializing(name):  # by a machinery that does not say when it has ended
            self._unasked[name] = waiting
            return
        for callback in waiting:
            callback(name, False)

    def _reloaded(self, fullname: str, path: Any, target: Any) -> ModuleSpec | None:
        """The spec of a module that is reloaded, with callbacks after it."""
        for finder in [finder for finder in sys.meta_path if finder is not self]:
            spec = finder.find_spec(fullname, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    unfinished = target.__spec__ if is_initializing(fullname) else None
                    spec.loader = _ReloadingLoader(spec.loader, self._callbacks[fullname], unfinished)
                return spec
        return None


class _ReloadingLoader(Loader):
    """A module's own loader for one reload, with callbacks after it.

    Args:
        loader: the module's.
        callbacks: see :func:`when_imported`.
        unfinished: the spec of the import that the module is still in; the callbacks wait for its end.
    """

    def __init__(self, loader: Any, callbacks: list[Callback], unfinished: ModuleSpec | None) -> None:
        self._loader, self._callbacks, self._unfinished = loader, callbacks, unfinished

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if self._unfinished is not None:
            module.__spec__ = self._unfinished
        for callback in list(self._callbacks):
            if not _at_end(module.__name__, callback):
                callback(module.__name__, True)


_finder = _Finder()
