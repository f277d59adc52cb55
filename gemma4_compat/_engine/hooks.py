"""Run callbacks once a module is fully imported.

A finder at the front of ``sys.meta_path`` gives the modules asked for a loader that calls back once the module's own
loader has executed it. Hazards this file exists for:

* A callback may be registered while its module is half imported, or searched for by another thread. The running import
  holds the lock of the module, and calls back when it releases it: see :func:`_listen`.
* A module that is not imported, but put into ``sys.modules``, is noticed at the next import of any module.
* An exception in a callback makes the user's import fail. The second import calls the callback again.
* ``importlib.reload`` (and Jupyter's autoreload, which calls it) executes a module again, which calls back as well.

What holds when :func:`when_imported` has returned: the module is fully imported, and the caller sees it; or the import
that completes it calls back before it ends. The reason: an import holds the lock of its module from before the
search until after the module is complete. If there is no lock once the finder has the callback, earlier imports have
ended, and later ones ask the finder. If there is a lock, its release is heard, unless the release has begun: then the
module is complete.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from importlib import _bootstrap
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

#: ``callback(name, own)``; ``own``: it is called inside the import of the module, and an exception makes that fail.
Callback = Callable[[str, bool], None]

#: The locks of modules that are being imported, by name; weak references. Without them such modules are noticed late.
_locks: dict[str, Callable[[], Any]] | None = getattr(_bootstrap, "_module_locks", None)


def when_imported(name: str, callback: Callback) -> None:
    """Call ``callback`` at the end of the import of the module ``name``, and whenever it is reloaded.

    It does not call for a module that is imported already: the caller looks afterwards, and reports it with
    :func:`seen`. A second request also calls at the end of a running import, whose hook may have been called before.
    Two threads may both register at the same time; that is harmless.
    """
    if callback not in _finder.callbacks(name):
        _finder.enter()
        _finder.wait(name, callback)
        _finder.add(name, callback)  # last: a thread that finds it there need not wait
    if _lock(name) is not None:  # found under no lock of ours: dropping a module's lock takes the global import lock
        at_end(name, callback)


def at_end(name: str, callback: Callback) -> None:
    """Call ``callback`` at the end of the running import of the module."""
    _finder.wait(name, callback)
    _listen(name)


def seen(name: str, callback: Callback) -> None:
    """The caller of :func:`when_imported` has found the module imported."""
    _finder.waiting(name).pop(callback, None)


def is_initializing(name: str) -> bool:
    """Whether the module is in sys.modules but its body is still being executed."""
    return _is_initializing(sys.modules.get(name))


def is_imported(name: str) -> bool:
    """Whether the module is in sys.modules and its body has been executed."""
    module = sys.modules.get(name)  # once: an import that ends takes it out, and puts it back
    return module is not None and not _is_initializing(module)


def is_absent(name: str) -> bool:
    """Whether a module does not exist, as far as the imported packages around it can tell.

    Imports nothing, and searches only the file system: other finders may do anything when they are asked.
    """
    package, _, rest = name.partition(".")
    while rest and is_imported(package):
        part, _, rest = rest.partition(".")
        parent, package = sys.modules[package], f"{package}.{part}"
        if package not in sys.modules and isinstance(parent, ModuleType):
            path = vars(parent).get("__path__")  # None: what was a package is a module now
            return path is None or PathFinder.find_spec(package, path) is None
    return False


def _is_initializing(module: Any) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _lock(name: str) -> Any:
    """The lock of a module that is being imported, or searched for; else None."""
    reference = None if _locks is None else _locks.get(name)
    return None if reference is None else reference()


def _listen(name: str) -> bool:
    """Listen for the end of the running import of the module, which begins before the search. False: none runs.

    Callbacks then run inside that import: the module is still locked, and that import raises what a callback raises.
    """
    lock = _lock(name)
    if lock is None:
        return False
    kind: Any = type(lock)
    lock.__class__ = _listening(kind)
    return True


@functools.cache
def _listening(kind: Any) -> Any:
    """A class of module locks that reports their release. The locks live as long as the imports that hold them."""
    if hasattr(kind, "_is_listening"):
        return kind

    def release(self: Any) -> None:
        try:
            _finder.released(self.name)
        finally:
            kind.release(self)

    return type(kind.__name__, (kind,), {"release": release, "_is_listening": True})


def _leave_out(name: str) -> None:
    """Clean up as Python does after a module whose own code raises."""
    module = sys.modules.pop(name, None)
    package, _, child = name.rpartition(".")
    attributes = getattr(sys.modules.get(package), "__dict__", {})
    if attributes.get(child) is module:
        attributes.pop(child, None)


class _Finder:
    """The first meta path entry. What it finds is what the others find, with callbacks after it.

    At any other search it looks for modules that were put into ``sys.modules``. Dictionaries of callbacks are never
    removed, so that no callback is put into a dictionary that was.
    """

    def __init__(self) -> None:
        self._callbacks: dict[str, dict[Callback, bool]] = {}
        self._waiting: dict[str, dict[Callback, bool]] = {}  # neither called nor seen
        self._searches: set[tuple[int, str]] = set()  # by thread, for finders that search the meta path themselves

    def callbacks(self, name: str) -> dict[Callback, bool]:
        return self._callbacks.get(name, {})

    def waiting(self, name: str) -> dict[Callback, bool]:
        return self._waiting.get(name, {})

    def add(self, name: str, callback: Callback) -> None:
        self._callbacks.setdefault(name, {})[callback] = True

    def wait(self, name: str, callback: Callback) -> None:
        self._waiting.setdefault(name, {})[callback] = True

    def enter(self) -> None:
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if target is None and self._missed() and not _listen(fullname) and _locks is None:
            # Only here: this may run under Python's global import lock. A callback imports, and could wait for a
            # thread that waits for this lock.
            self._notice()
        search = (threading.get_ident(), fullname)
        if fullname not in self._callbacks or search in self._searches:
            return None
        self._searches.add(search)
        try:
            return self._found(fullname, path, target)
        finally:
            self._searches.discard(search)

    def _found(self, fullname: str, path: Any, target: Any) -> ModuleSpec | None:
        """The spec of a module that is imported or reloaded, with callbacks after it."""
        for finder in [finder for finder in sys.meta_path if finder is not self]:
            spec = finder.find_spec(fullname, path, target) if hasattr(finder, "find_spec") else None
            if spec is None:
                continue
            if hasattr(spec.loader, "exec_module"):
                unfinished = target.__spec__ if target is not None and is_initializing(fullname) else None
                spec.loader = _Loader(spec.loader, self._callbacks[fullname], unfinished)  # type: ignore[assignment]
            else:  # a namespace package, or a loader of old: the end of its import is heard
                _listen(fullname)
            return spec
        return None

    def released(self, name: str) -> None:
        """React to an import of the module that releases its lock: it has ended, or was nested in another."""
        waiting = self.waiting(name)
        if waiting and is_imported(name):
            try:
                for callback in list(waiting):
                    if waiting.pop(callback, False):
                        callback(name, True)
            except BaseException:  # the import fails; the next one calls all of them
                _leave_out(name)
                raise
        self._notice()

    def _missed(self) -> list[str]:
        """Modules that exist, and that no running import will report."""
        return [
            name
            for name, waiting in self._waiting.copy().items()
            if waiting and name in sys.modules and is_imported(name) and _lock(name) is None
        ]

    def _notice(self) -> None:
        for name in self._missed():
            waiting = self.waiting(name)
            for callback in list(waiting):
                if waiting.pop(callback, False):
                    callback(name, False)


class _Loader:
    """A module's own loader for one import or reload, with callbacks after it. Everything else is the own loader's.

    Args:
        loader: the module's own.
        callbacks: see :func:`when_imported`.
        unfinished: the spec of the module's running import, if this is a reload inside it; the callbacks wait for its
            end.
    """

    def __init__(self, loader: Any, callbacks: dict[Callback, bool], unfinished: ModuleSpec | None) -> None:
        self._loader, self._callbacks, self._unfinished = loader, callbacks, unfinished

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        create = getattr(self._loader, "create_module", None)
        return None if create is None else create(spec)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if self._unfinished is not None:
            module.__spec__ = self._unfinished
        for callback in list(self._callbacks):
            if self._unfinished is not None:
                at_end(name, callback)
                continue
            seen(name, callback)
            callback(name, True)


_finder = _Finder()
