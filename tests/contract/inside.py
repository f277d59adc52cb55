"""What runs in a child process with the real libraries: ``python -m tests.contract.inside SCENARIO MODULE...``.

Each scenario prints one JSON object on its last line. MODULE... are the modules that the patches name; where one does
not exist in the installed release it is left out. At module level nothing of gemma4_compat is imported, since most
scenarios are about when it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import json
import operator
import os
import pickle
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

LIBRARIES = ("accelerate", "bitsandbytes", "peft", "transformers")
FUNCTIONS = (types.FunctionType, staticmethod, classmethod, property)
UNKNOWN = "000000000000"


def import_libraries(modules: list[str]) -> None:
    for name in [*LIBRARIES, *modules]:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)


def imported(modules: list[str]) -> list[str]:
    return [name for name in modules if name in sys.modules]


# --------------------------------------------------------------------------------------------------- looking at things


def modules_loaded() -> list[types.ModuleType]:
    return [item for item in list(sys.modules.values()) if isinstance(item, types.ModuleType)]


def namespaces() -> Iterator[tuple[str, Any]]:
    """Every loaded module, and every class that a module of the libraries holds."""
    for module in modules_loaded():
        yield module.__name__, module
        if module.__name__.partition(".")[0] in LIBRARIES:
            for name, value in list(vars(module).items()):
                if isinstance(value, type):
                    yield f"{module.__name__}.{name}", value


class Snapshot:
    """The functions that every namespace of the libraries holds, to be compared by identity."""

    def __init__(self) -> None:
        self.held = self._look()
        self.modules: list[types.ModuleType] = []
        self.clean: list[tuple[Any, list[str], list[Any]]] = []

    def _look(self) -> dict[tuple[int, str], tuple[str, Any, Any]]:
        return {
            (id(owner), name): (f"{label}.{name}", value, owner)
            for label, owner in namespaces()
            if label.partition(".")[0] in LIBRARIES
            for name, value in list(vars(owner).items())
            if type(value) in FUNCTIONS
        }

    def differences(self) -> list[str]:
        """What was replaced, removed or added since, and every name that still holds a function of ours.

        Asked hundreds of times about hundreds of thousands of names, so it looks into them only where a namespace is
        not, object by object, what it was when the last look found nothing.
        """
        if self._is_clean():
            return []
        found = self._differences()
        self.modules = [] if found else modules_loaded()
        owners = {id(owner): owner for _, owner in namespaces()} if self.modules else {}
        self.clean = [(owner, list(vars(owner)), list(vars(owner).values())) for owner in owners.values()]
        return found

    def _is_clean(self) -> bool:
        modules = modules_loaded()
        return (
            len(modules) == len(self.modules)
            and all(map(operator.is_, modules, self.modules))
            and all(
                list(vars(owner)) == names and all(map(operator.is_, vars(owner).values(), values))
                for owner, names, values in self.clean
            )
        )

    def _differences(self) -> list[str]:
        changed, kept, seen = set(), 0, set()
        for label, owner in namespaces():
            if id(owner) in seen:  # a class that several modules hold
                continue
            seen.add(id(owner))
            is_library = label.partition(".")[0] in LIBRARIES
            for name, value in list(vars(owner).items()):
                if type(value) not in FUNCTIONS:
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


def ours() -> list[str]:
    """Every name that holds a function of ours. Asked hundreds of times about hundreds of thousands of names."""
    return [
        f"{label}.{name}"
        for label, owner in namespaces()
        for name, value in list(vars(owner).items())
        if type(value) in FUNCTIONS and is_ours(function(value))
    ]


def function(value: Any) -> Any:
    """The function in a slot: a static or class method's, a property's getter, or what is there itself."""
    if type(value) is property:
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


def slot(target: Any) -> tuple[Any, str] | None:
    """The owner and the last part of a target's name; None where the installed release has no such thing."""
    owner: Any = sys.modules.get(target.module)
    *path, name = target.name.split(".")
    for part in path:
        owner = getattr(owner, part, None)
    return (owner, name) if owner is not None and hasattr(owner, name) else None


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
    statuses = engine.status()
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


def engine_module() -> Any:
    importlib.import_module("gemma4_compat")
    return sys.modules["gemma4_compat._engine"]


@contextlib.contextmanager
def instead(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


# ----------------------------------------------------------------------------------------------------------- orderings


def before(modules: list[str]) -> dict[str, Any]:
    early = imported(modules)
    import gemma4_compat

    import_libraries(modules)
    return {"early": early, "seen": look(gemma4_compat)}


def between(modules: list[str]) -> dict[str, Any]:
    import transformers

    assert transformers.PreTrainedModel  # the package is lazy; this imports most of what a model needs
    early = imported(modules)
    import gemma4_compat

    import_libraries(modules)
    return {"early": early, "seen": look(gemma4_compat)}


def after(modules: list[str]) -> dict[str, Any]:
    import_libraries(modules)
    untouched = Snapshot()
    import gemma4_compat

    patches = gemma4_compat.patches()
    detected = {patch.id: patch.detect and patch.detect() for patch in patches}
    seen = look(gemma4_compat)
    looks = [faults_of_appearance(patch, untouched) for patch in patches]
    gemma4_compat.install()
    twice = look(gemma4_compat)
    gemma4_compat.revert()
    reverted = {"seen": look(gemma4_compat), "differences": untouched.differences()}
    single = {}
    for patch in patches:
        gemma4_compat.install()
        gemma4_compat.revert(patch.id)
        without = look(gemma4_compat)
        gemma4_compat.install()
        single[patch.id] = {"without": without, "again": look(gemma4_compat)}
    gemma4_compat.revert()
    return {
        "early": imported(modules),
        "detected": detected,
        "seen": seen,
        "appearance": {patch.id: faults for patch, faults in zip(patches, looks)},
        "twice": twice,
        "reverted": reverted,
        "single": single,
        "alone": {patch.id: alone(patch, untouched) for patch in patches},
        "disabled": {patch.id: disabled(patch, untouched) for patch in patches},
        "raising": {patch.id: raising(patch, untouched) for patch in patches},
        "changed": {patch.id: changed(patch, untouched) for patch in patches},
        "versions": {patch.id: other_versions(patch, untouched) for patch in patches},
        "differences": untouched.differences(),
    }


# --------------------------------------------- experiments on libraries that are there, each with an engine of its own


def faults_of_appearance(patch: Any, untouched: Snapshot) -> list[str]:
    """Targets that look different from the original to introspection, or cannot be pickled by name."""
    faults = []
    for target in patch.targets:
        place = slot(target)
        if place is None or patch.id not in marks(*place):
            continue
        owner, name = place
        found = vars(owner)[name]
        holders = owner.__mro__ if isinstance(owner, type) else (owner,)  # the first has it, or it was inherited
        original = next(untouched.held[id(one), name][1] for one in holders if (id(one), name) in untouched.held)
        if type(found) is not type(original):
            faults.append(f"{target} is a {type(found).__name__}")
        if inspect.signature(function(found)) != inspect.signature(function(original)):
            faults.append(f"{target} has another signature")
        if type(found) is property:
            continue  # which Python cannot pickle
        bound = getattr(owner, name)
        if pickle.loads(pickle.dumps(bound)) != bound:
            faults.append(f"{target} is another after pickling")
    return faults


def alone(patch: Any, untouched: Snapshot) -> dict[str, Any]:
    engine = engine_module().Engine([patch])
    engine.install()
    seen = look(engine)[patch.id]
    engine.revert(patch.id)
    return {"seen": seen, "differences": untouched.differences()}


def disabled(patch: Any, untouched: Snapshot) -> dict[str, Any]:
    import gemma4_compat

    engine = engine_module().Engine(gemma4_compat.patches())
    os.environ["GEMMA4_COMPAT_DISABLE"] = patch.id
    engine.install()
    del os.environ["GEMMA4_COMPAT_DISABLE"]
    seen = look(engine)
    engine.revert()
    return {"seen": seen, "differences": untouched.differences()}


@contextlib.contextmanager
def raising_at(counts: dict[str, int]) -> Iterator[None]:
    """By patch, which of its replacements raises (the first is 1)."""
    from gemma4_compat._engine.changes import ChangeSet

    replace, calls = ChangeSet.replace, dict[str, int]()

    def breaks(self: Any, *arguments: Any) -> None:
        calls[self.patch_id] = calls.get(self.patch_id, 0) + 1
        if calls[self.patch_id] == counts[self.patch_id]:
            raise RuntimeError(f"replacement {calls[self.patch_id]} fails on purpose")
        replace(self, *arguments)

    with instead(ChangeSet, "replace", breaks):
        yield


def raising(patch: Any, untouched: Snapshot) -> list[dict[str, Any]]:
    """One experiment for each replacement of the patch."""
    found = []
    for count in range(1, sum(slot(target) is not None for target in patch.targets) + 1):
        engine = engine_module().Engine([patch])
        with raising_at({patch.id: count}):
            said = with_warnings(engine.install)
        found.append({"seen": look(engine)[patch.id], "said": said, "differences": untouched.differences()})
    return found


def changed(patch: Any, untouched: Snapshot) -> dict[str, dict[str, Any]]:
    """One experiment for each target: its code is said to be unknown."""
    module, found = engine_module(), {}
    for target in patch.targets:
        place = slot(target)
        if place is None:
            continue
        owner, name = place
        holders = owner.__mro__ if isinstance(owner, type) else (owner,)
        raw = next(vars(holder)[name] for holder in holders if name in vars(holder))

        def fingerprint(function: Any, raw: Any = raw, real: Callable[[Any], str] = module.fingerprint) -> str:
            return UNKNOWN if function is raw else real(function)

        engine = module.Engine([patch])
        with instead(module, "fingerprint", fingerprint):
            said = with_warnings(engine.install)
        found[str(target)] = {"seen": look(engine)[patch.id], "said": said, "differences": untouched.differences()}
    return found


def other_versions(patch: Any, untouched: Snapshot) -> dict[str, dict[str, Any]]:
    """The patch with its library, or one that it requires, said to be another release, or absent."""
    from gemma4_compat._engine import versions

    names = [patch.distribution, *(versions.requirement(text)[0] for text in patch.requires)]
    found = {}
    for name in names:
        for version in ("0.0.1", "9999.0", None):

            def say(asked: str, real: Callable[[str], Any], name: str = name, version: str | None = version) -> Any:
                return version if asked == name else real(asked)

            installed, loaded = versions.installed, versions.loaded
            engine = engine_module().Engine([patch])
            with (
                instead(versions, "installed", lambda asked, say=say, real=installed: say(asked, real)),
                instead(versions, "loaded", lambda asked, say=say, real=loaded: say(asked, real)),
            ):
                said = with_warnings(engine.install)
                seen = look(engine)[patch.id]
            engine.revert()
            found[f"{name} {version}"] = {"seen": seen, "said": said}
    differences = untouched.differences()  # one look for all: it takes a quarter of a second
    return {name: {**entry, "differences": differences} for name, entry in found.items()}


# ---------------------------------------------------------------------------------- things that go wrong on the import


def raising_on_import(modules: list[str]) -> dict[str, Any]:
    import gemma4_compat

    with raising_at({patch.id: min(2, len(patch.targets)) for patch in gemma4_compat.patches()}):
        said = with_warnings(lambda: import_libraries(modules))
    return {"said": said, "seen": look(gemma4_compat), "ours": ours(), "imported": imported(modules)}


def changed_on_import(modules: list[str]) -> dict[str, Any]:
    import gemma4_compat

    with instead(engine_module(), "fingerprint", lambda _function: UNKNOWN):
        said = with_warnings(lambda: import_libraries(modules))
    return {"said": said, "seen": look(gemma4_compat), "ours": ours(), "imported": imported(modules)}


def empty_modules(modules: list[str]) -> dict[str, Any]:
    """Modules without content where the libraries should be."""
    for module in modules:
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            sys.modules.setdefault(name, types.ModuleType(name))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import gemma4_compat
    said = [str(item.message) for item in caught if item.category is gemma4_compat.Gemma4CompatWarning]
    return {"said": said, "seen": look(gemma4_compat), "ours": ours()}


# ------------------------------------------------------------------------------------------ the releases of the future


def thread() -> dict[str, str]:
    """The releases of the forum thread's stack, by distribution."""
    file = Path(__file__).resolve().parents[2] / "constraints" / "thread.txt"
    return dict(line.split("==") for line in file.read_text(encoding="utf-8").splitlines() if "==" in line)


def as_of(patch: Any, releases: dict[str, str]) -> Any:
    """The patch as it would be if ``releases`` were the newest: no later code known, no fix. None: not written yet."""
    newest = Version(releases[patch.distribution])
    targets = []
    for target in patch.targets:
        first = {code: Version(span.partition(" - ")[0]) for code, span in target.known.items()}
        known = {code: span for code, span in target.known.items() if first[code] <= newest}
        if known:
            targets.append(dataclasses.replace(target, known=known))
        elif not target.optional:
            return None
    required = map(Requirement, patch.requires)
    return dataclasses.replace(
        patch,
        targets=tuple(targets),
        affected=_open(SpecifierSet(patch.affected)),
        requires=tuple(f"{item.name}{_open(item.specifier)}" for item in required),
        measured=releases[patch.distribution],
        fixed=None,
    )


def _open(specifiers: SpecifierSet) -> str:
    return ",".join(str(item) for item in specifiers if not item.operator.startswith("<"))


def future(modules: list[str]) -> dict[str, Any]:
    """Patches that know nothing later than the thread's stack, armed before the installed libraries and after them."""
    os.environ["GEMMA4_COMPAT_DISABLE"] = "all"
    import gemma4_compat
    from gemma4_compat._engine.changes import raw_slot

    del os.environ["GEMMA4_COMPAT_DISABLE"]
    patches = [old for patch in gemma4_compat.patches() if (old := as_of(patch, thread())) is not None]
    early, late = engine_module().Engine(patches), engine_module().Engine(patches)
    early.install()
    said = with_warnings(lambda: import_libraries(modules))
    found = {"early": {"seen": look(early), "said": said}}
    early.revert()
    untouched = Snapshot()
    places = {str(target): slot(target) for patch in patches for target in patch.targets}
    code = {name: engine_module().fingerprint(raw_slot(*place)) if place else None for name, place in places.items()}
    detected = {patch.id: patch.detect and patch.detect() for patch in patches}
    said = with_warnings(late.install)
    found["late"] = {"seen": look(late), "said": said}
    late.revert()
    return found | {"code": code, "detected": detected, "differences": untouched.differences()}


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (before, between, after, raising_on_import, changed_on_import, empty_modules, future)
}

if __name__ == "__main__":
    print("\n" + json.dumps(SCENARIOS[sys.argv[1]](sys.argv[2:])))
