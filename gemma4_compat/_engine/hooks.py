"""Call somebody once a module is completely imported. The only file that imports wrapt.

Hazards this file exists for:

* A hook registered while its module is half imported fires at once, on the half-built module. Such a module is put
  off: Python's import machinery is asked at every later import of anything whether it has finished.
* An exception in a post-import hook makes the user's import fail, and the second import succeeds unpatched. Callbacks
  given to :func:`when_imported` must therefore not raise unless they mean that.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

import wrapt

Callback = Callable[[str], None]


def when_imported(name: str, callback: Callback) -> None:
    """Call ``callback(name)`` when the module ``name`` has been imported. Not when it is already: the caller looks."""
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


_unfinished = _Unfinished()
sweep = _unfinished.sweep
