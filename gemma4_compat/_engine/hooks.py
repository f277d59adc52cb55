"""Call somebody once a module is completely imported. The only file that imports wrapt.

Hazards this file exists for:

* A hook registered while its module is half imported fires at once, on the half-built module. Such a module is put
  off: Python's import machinery is asked at every later import of anything whether it has finished.
* An exception in a post-import hook makes the user's import fail, and the second import succeeds unpatched. Callbacks
  given to :func:`when_imported` must therefore not raise unless they mean that.
* ``importlib.reload`` (and Jupyter's autoreload, which calls it) executes a module again; wrapt calls no hook then.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import wrapt

Callback = Callable[[str], None]


def when_imported(name: str, callback: Callback) -> None:
    """Call ``callback(name)`` when the module ``name`` has been imported, and whenever it is reloaded.

    Not when it is imported already: the caller looks.
    """
    registering = True

    def fire(_module: Any) -> None:
        # The module handed over is not used: the entry in sys.modules may have been replaced while it loaded.
        if registering and is_initializing(name):
            _unfinished.add(name, callback)
        elif not registering:
            try:
                callback(name)
            except BaseException:  # the import fails, and will be tried again
                _unfinished.add(name, callback)
                raise

    wrapt.register_post_import_hook(fire, name)
    registering = False
    _reloads.add(name, callback)  # after wrapt: its finder would answer for a module that is reloaded half imported


def is_initializing(name: str) -> bool:
    """Whether the module is in sys.modules but its body is still being executed."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


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


class _Unfinished:
    """A meta path entry that finds nothing; being asked is how it notices that half-imported modules have finished."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[str, Callback]] = []

    def add(self, name: str, callback: Callback) -> None:
        with self._lock:
            self._waiting.append((name, callback))
            if self not in sys.meta_path:
                sys.meta_path.insert(0, self)

    def find_spec(self, _fullname: str, _path: Any = None, _target: Any = None) -> None:
        self.sweep()

    def sweep(self) -> None:
        """Fire what has finished. Callbacks run outside the lock: they may import."""
        with self._lock:
            finished = [item for item in self._waiting if not is_initializing(item[0])]
            self._waiting = [item for item in self._waiting if item not in finished]
            # It stays on sys.meta_path: removed while it is asked, the finder after it would be skipped.
        for name, callback in finished:
            if name in sys.modules:
                callback(name)
            else:  # an import that failed took its module away again
                when_imported(name, callback)


class _Reloads:
    """A meta path entry that notices reloads: ``importlib.reload`` alone searches for a module that is there."""

    def __init__(self) -> None:
        self._callbacks: dict[str, list[Callback]] = {}

    def add(self, name: str, callback: Callback) -> None:
        callbacks = self._callbacks.setdefault(name, [])
        if callback not in callbacks:
            callbacks.append(callback)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if target is None or fullname not in self._callbacks:
            return None
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
            if self._unfinished is None:
                callback(module.__name__)
            else:
                _unfinished.add(module.__name__, callback)


_reloads = _Reloads()
_unfinished = _Unfinished()
sweep = _unfinished.sweep
