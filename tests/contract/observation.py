"""What a process with the real libraries holds: which names, replaced by which patch, and what changed since a look.

At module level nothing of gemma4_compat is imported: the scenarios of ``inside.py`` are about when it is.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import itertools
import operator
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LIBRARIES = ("accelerate", "bitsandbytes", "peft", "transformers")
#: Of torch only what patches replace is looked at.
TORCH = ("torch.distributed.fsdp._fully_shard.", "torch.nn.parallel.distributed")
#: Upstream imports these only where there is a GPU, and elsewhere they cannot be imported.
FOR_GPUS = ("bitsandbytes.backends.cuda.ops",)
FUNCTIONS = (types.FunctionType, staticmethod, classmethod, property)


def is_function(value: Any) -> bool:
    """Whether a slot holds a function of some kind; what reads an attribute of instances is a kind of property."""
    return type(value) in FUNCTIONS or issubclass(type(value), property)


def modules_loaded() -> list[types.ModuleType]:
    return [item for item in list(sys.modules.values()) if isinstance(item, types.ModuleType)]


def is_ours_to_look_at(name: str) -> bool:
    """Whether a module, or a name in it, is of a library that patches replace functions of."""
    return name.partition(".")[0] in LIBRARIES or name.startswith(TORCH)


def namespaces() -> Iterator[tuple[str, Any]]:
    """Every loaded module, and every class that a module of the libraries holds."""
    for module in modules_loaded():
        yield module.__name__, module
        if is_ours_to_look_at(module.__name__):
            for name, value in list(vars(module).items()):
                if isinstance(value, type):
                    yield f"{module.__name__}.{name}", value


class Snapshot:
    """The functions that every namespace of the libraries holds, to be compared by identity."""

    def __init__(self) -> None:
        self.held = self._look()
        self.modules: list[types.ModuleType] = []
        self.clean = _Contents([])

    def _look(self) -> dict[tuple[int, str], tuple[str, Any, Any]]:
        return {
            (id(owner), name): (f"{label}.{name}", value, owner)
            for label, owner in namespaces()
            if is_ours_to_look_at(label)
            for name, value in list(vars(owner).items())
            if is_function(value)
        }

    def differences(self) -> list[str]:
        """What was replaced, removed or added since, and every name that still holds a function of ours.

        Asked hundreds of times about hundreds of thousands of names, so it looks into them only if some namespace is
        not, object by object, what it was when the last look found nothing.
        """
        if self._is_clean():
            return []
        found = self._differences()
        self.modules = [] if found else modules_loaded()
        owners = {id(owner): owner for _, owner in namespaces()} if self.modules else {}
        self.clean = _Contents(list(owners.values()))
        return found

    def _is_clean(self) -> bool:
        modules = modules_loaded()
        return (
            len(modules) == len(self.modules)
            and all(map(operator.is_, modules, self.modules))
            and self.clean.are_as_they_were()
        )

    def _differences(self) -> list[str]:
        changed, kept, seen = set(), 0, set()
        for label, owner in namespaces():
            if id(owner) in seen:  # a class that several modules hold
                continue
            seen.add(id(owner))
            is_library = is_ours_to_look_at(label)
            for name, value in list(vars(owner).items()):
                if not is_function(value):
                    continue
                if is_library:
                    before = self.held.get((id(owner), name))
                    if before is None or before[1] is not value:
                        changed.add(f"{label}.{name}")
                    kept += before is not None
                if is_ours(function(value)):
                    changed.add(f"{label}.{name}")
        if kept != len(self.held):  # something is gone
            now = self._look()
            changed |= {entry[0] for key, entry in self.held.items() if key not in now}
        return sorted(changed)


class _Contents:
    """All names and values of some namespaces, in flat lists: a comparison is then one loop, and not in Python."""

    def __init__(self, owners: list[Any]) -> None:
        self.owners = owners
        self.spaces = list(map(vars, owners))  # views
        self.lengths, self.names, self.values = self._now()

    def _now(self) -> tuple[list[int], list[str], list[Any]]:
        values = itertools.chain.from_iterable(space.values() for space in self.spaces)
        return list(map(len, self.spaces)), list(itertools.chain.from_iterable(self.spaces)), list(values)

    def are_as_they_were(self) -> bool:
        lengths, names, values = self._now()
        return lengths == self.lengths and names == self.names and all(map(operator.is_, values, self.values))


def ours() -> list[str]:
    """Every name that holds a function of ours. Asked hundreds of times about hundreds of thousands of names."""
    return [
        f"{label}.{name}"
        for label, owner in namespaces()
        for name, value in list(vars(owner).items())
        if is_function(value) and is_ours(function(value))
    ]


def function(value: Any) -> Any:
    """The function in a slot: a static or class method's, a property's getter, or what is there itself."""
    if issubclass(type(value), property):
        return value.fget
    return value.__func__ if type(value) in (staticmethod, classmethod) else value


def is_ours(value: Any) -> bool:
    """Only plain functions are looked into: to ask a lazy object for an attribute may import something."""
    return type(value) is types.FunctionType and "__gemma4_compat__" in vars(value)


def marks(owner: Any, name: str) -> list[str]:
    """The ids of the patches whose replacements are in this slot, the outermost first."""
    value, found = function(vars(owner).get(name)), []
    while is_ours(value):
        found.append(value.__gemma4_compat__)
        value = value.__wrapped__
    return found


def is_needed(target: Any) -> bool:
    """Whether the target is replaced in the installed release, if it exists."""
    from gemma4_compat._engine import versions

    return not target.affected or versions.admits(
        target.affected, versions.current(target.module.partition(".")[0]) or "0"
    )


def slot(target: Any) -> tuple[Any, str] | None:
    """The owner and the last part of a target's name; None where the release has no such thing, or no need."""
    if not is_needed(target):
        return None
    owner: Any = sys.modules.get(target.module)
    *path, name = target.name.split(".")
    for part in path:
        owner = getattr(owner, part, None)
    return (owner, name) if owner is not None and (target.attribute or hasattr(owner, name)) else None


def is_replaced(patch: Any) -> dict[str, bool | None]:
    """For every target, whether it runs through this patch; None where it does not exist."""
    found = {str(target): slot(target) for target in patch.targets}
    return {name: patch.id in marks(*place) if place else None for name, place in found.items()}


def stale(patches: Any) -> dict[str, list[str]]:
    """For each patch, names in any module that still hold the original of a module function which runs through it.

    One look at everything for all of them: there are hundreds of thousands of names.
    """
    originals: dict[int, list[str]] = {}
    for patch in patches:
        for target in patch.targets:
            place = slot(target)
            if place and isinstance(place[0], types.ModuleType) and patch.id in marks(*place):
                held = vars(place[0])[place[1]]
                original = inspect.unwrap(held, stop=lambda function: not is_ours(function))
                originals.setdefault(id(original), []).append(patch.id)
    found: dict[str, list[str]] = {patch.id: [] for patch in patches}
    for module in modules_loaded() if originals else []:
        if originals.keys().isdisjoint(map(id, list(vars(module).values()))):
            continue
        for name, value in list(vars(module).items()):
            for patch_id in originals.get(id(value), ()):
                found[patch_id].append(f"{module.__name__}.{name}")
    return found


def look(engine: Any) -> dict[str, Any]:
    """The state of every patch of an engine (or of the package), and what is replaced."""
    from gemma4_compat._engine import dormant

    statuses = engine.status()
    dormant.show()  # what nothing needs yet is looked at, too
    held = stale(engine.patches())
    return {
        patch.id: {
            "state": statuses[patch.id].state,
            "reason": statuses[patch.id].reason,
            "late": statuses[patch.id].late,
            "overridden": statuses[patch.id].overridden,
            "replaced": is_replaced(patch),
            "stale": held[patch.id],
        }
        for patch in engine.patches()
    }


def with_warnings(action: Callable[[], Any]) -> list[str]:
    """The warnings of ours that ``action`` gives."""
    import gemma4_compat

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(item.message) for item in caught if issubclass(item.category, gemma4_compat.Gemma4CompatWarning)]


def groups_here(patch: Any) -> set[str]:
    """The groups of targets whose modules can be imported from the installed release. Imports nothing."""
    return {group for group, modules in patch.groups.items() if all(map(_is_installed, modules))}


def _is_installed(module: str) -> bool:
    if module in FOR_GPUS:
        import torch

        if not torch.cuda.is_available():
            return False
    root, *parts = module.split(".")
    spec = importlib.util.find_spec(root)
    if spec is None or spec.origin is None:
        return False
    path = Path(spec.origin).parent.joinpath(*parts)
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def engine_module() -> Any:
    importlib.import_module("gemma4_compat")
    return sys.modules["gemma4_compat._engine.engine"]


def detection_module() -> Any:
    """Where the engine looks at code: it takes fingerprints by this module's name for it."""
    importlib.import_module("gemma4_compat")
    return sys.modules["gemma4_compat._engine.detection"]


@contextlib.contextmanager
def instead(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
