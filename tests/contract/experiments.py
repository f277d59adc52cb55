"""Experiments on libraries that are already imported, each with an engine of its own."""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tests.contract.observation import (
    Snapshot,
    detection_module,
    engine_module,
    function,
    instead,
    is_ours_to_look_at,
    look,
    marks,
    slot,
    with_warnings,
)

UNKNOWN = "000000000000"


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
        held = [untouched.held[id(one), name][1] for one in holders if (id(one), name) in untouched.held]
        if target.attribute:
            continue  # there was no function
        if not is_ours_to_look_at(target.module):
            faults.append(f"{target} was not looked at before: its library is not in observation.LIBRARIES")
            continue
        original = held[0] if held else sys.modules["gemma4_compat._engine.changes"].missing
        if type(found) is not type(original):
            faults.append(f"{target} is a {type(found).__name__}")
        if inspect.signature(function(found)) != inspect.signature(function(original)):
            faults.append(f"{target} has another signature")
        # Of a forward, accelerate copies what it has to one that is bound, so it has none that this one reads.
        read = not (target.name.endswith(".forward") or hasattr(function(original), "__wrapped__"))
        if read and inspect.getfullargspec(function(found)) != inspect.getfullargspec(function(original)):
            faults.append(f"{target} has another getfullargspec")
        faults += [
            f"{target} has another {name}"
            for name in ("__defaults__", "__kwdefaults__", "__doc__")
            if getattr(function(found), name) != getattr(function(original), name)
        ]
        if type(found) is property or "<locals>" in function(original).__qualname__:
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


def disabled(some: list[Any], untouched: Snapshot) -> dict[str, Any]:
    """These patches are disabled, the others are not."""
    import gemma4_compat

    engine = engine_module().Engine(gemma4_compat.patches())
    ids = [patch.id for patch in some]
    os.environ["GEMMA4_COMPAT_DISABLE"] = ",".join(ids)
    engine.install()
    del os.environ["GEMMA4_COMPAT_DISABLE"]
    seen = look(engine)
    engine.revert()
    return {"ids": ids, "seen": seen, "differences": untouched.differences()}


@contextlib.contextmanager
def raising_at(counts: dict[str, int]) -> Iterator[None]:
    """By patch, from which of its replacements on they raise (the first is 1)."""
    from gemma4_compat._engine.changes import ChangeSet

    replace, calls = ChangeSet.replace, dict[str, int]()

    def breaks(self: Any, *arguments: Any, **options: Any) -> None:
        calls[self.patch_id] = calls.get(self.patch_id, 0) + 1
        if calls[self.patch_id] >= counts[self.patch_id]:
            raise RuntimeError(f"replacement {calls[self.patch_id]} fails on purpose")
        replace(self, *arguments, **options)

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
        engine.revert()  # nothing has raised, and the patch is applied, where code of one of its groups is unknown
    return found


def changed(patch: Any, untouched: Snapshot) -> dict[str, dict[str, Any]]:
    """One experiment for each target: its code is said to be unknown."""
    from gemma4_compat._engine.changes import raw_slot

    module, found, raws = detection_module(), {}, []
    for target in patch.targets:
        place = slot(target)
        if place is not None:
            owner, name = place
            raws.append((target, raw_slot(owner, name, attribute=target.attribute)))
    for target, raw in raws:

        def fingerprint(function: Any, raw: Any = raw, real: Callable[[Any], str] = module.fingerprint) -> str:
            return UNKNOWN if function is raw else real(function)

        engine = engine_module().Engine([patch])
        with instead(module, "fingerprint", fingerprint):
            said = with_warnings(engine.install)
        seen = look(engine)[patch.id]
        engine.revert()  # another group of targets is applied all the same
        found[str(target)] = {"seen": seen, "said": said, "differences": untouched.differences()}
        # Classes inherit one function: it has changed for each of them.
        found[str(target)]["inherited"] = [str(other) for other, held in raws if held is raw]
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
