"""What runs in a child process with the real libraries: ``python -m tests.contract.inside SCENARIO MODULE...``.

Each scenario prints one JSON object on its last line. MODULE... are the modules that the patches name; where one does
not exist in the installed release it is left out. At module level nothing of gemma4_compat is imported, since most
scenarios are about when it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib
import json
import os
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests.contract import experiments
from tests.contract.experiments import UNKNOWN, raising_at
from tests.contract.observation import (
    FOR_GPUS,
    LIBRARIES,
    Snapshot,
    detection_module,
    engine_module,
    instead,
    is_needed,
    look,
    ours,
    slot,
    with_warnings,
)


def import_libraries(modules: list[str]) -> None:
    for name in [*LIBRARIES, *modules]:
        with contextlib.suppress(ModuleNotFoundError):
            try:
                importlib.import_module(name)
            except AttributeError:
                if name not in FOR_GPUS:
                    raise


@contextlib.contextmanager
def nothing_else_changes() -> Iterator[None]:
    """Inside, what is installed is read once, and looks at all objects leave out what exists now (no models)."""
    from gemma4_compat._engine import versions

    gc.freeze()
    with contextlib.ExitStack() as stack:
        for name in ("installed", "copies"):
            stack.enter_context(instead(versions, name, functools.cache(getattr(versions, name))))
        yield
    gc.unfreeze()


def imported(modules: list[str]) -> list[str]:
    return [name for name in modules if name in sys.modules]


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
    looks = [experiments.faults_of_appearance(patch, untouched) for patch in patches]
    gemma4_compat.install()
    twice = look(gemma4_compat)
    gemma4_compat.revert()
    reverted = {"seen": look(gemma4_compat), "differences": untouched.differences()}
    with nothing_else_changes():
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
            "alone": {patch.id: experiments.alone(patch, untouched) for patch in patches},
            "disabled": [experiments.disabled(patches[first::12], untouched) for first in range(12)],
            "raising": {patch.id: experiments.raising(patch, untouched) for patch in patches},
            "changed": {patch.id: experiments.changed(patch, untouched) for patch in patches},
            "versions": {patch.id: experiments.other_versions(patch, untouched) for patch in patches},
            "differences": untouched.differences(),
        }


def smallest_group(patch: Any) -> int:
    groups = [target.group for target in patch.targets if is_needed(target)]
    return min(map(groups.count, groups))


def raising_on_import(modules: list[str]) -> dict[str, Any]:
    import gemma4_compat

    with raising_at({patch.id: min(2, smallest_group(patch)) for patch in gemma4_compat.patches()}):
        said = with_warnings(lambda: import_libraries(modules))
    return {"said": said, "seen": look(gemma4_compat), "ours": ours(), "imported": imported(modules)}


def changed_on_import(modules: list[str]) -> dict[str, Any]:
    import gemma4_compat

    with instead(detection_module(), "fingerprint", lambda _function: UNKNOWN):
        said = with_warnings(lambda: import_libraries(modules))
    return {"said": said, "seen": look(gemma4_compat), "ours": ours(), "imported": imported(modules)}


def empty_modules(modules: list[str]) -> dict[str, Any]:
    """Modules without content where those with targets should be; the rest of torch says what the host is."""
    importlib.import_module("torch")
    for module in modules:
        parts = module.split(".")
        if parts[0] == "torch":
            sys.modules[module] = types.ModuleType(module)  # torch may have imported it
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            sys.modules.setdefault(name, types.ModuleType(name))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import gemma4_compat
    said = [str(item.message) for item in caught if item.category is gemma4_compat.Gemma4CompatWarning]
    return {"said": said, "seen": look(gemma4_compat), "ours": ours()}


def thread() -> dict[str, str]:
    """The releases of the reference stack, the one of the forum thread, by distribution."""
    file = Path(__file__).resolve().parents[2] / "constraints" / "thread.txt"
    return dict(line.split("==") for line in file.read_text(encoding="utf-8").splitlines() if "==" in line)


def as_of(patch: Any, releases: dict[str, str]) -> Any:
    """The patch as it would be if ``releases`` were the newest: no later code known, no fix. None: not written yet."""
    newest = Version(releases[patch.distribution])
    targets, unwritten = [], set()
    for target in patch.targets:
        first = {code: Version(span.partition(",")[0].partition(" - ")[0]) for code, span in target.known.items()}
        known = {code: span for code, span in target.known.items() if first[code] <= newest}
        if known:
            targets.append(dataclasses.replace(target, known=known))
        elif not target.optional:
            unwritten.add(target.group)
    targets = [target for target in targets if target.group not in unwritten]
    if not targets:
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
    """Patches of the day of the reference stack, armed before the installed libraries and after them."""
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
    targets = {str(target): target for patch in patches for target in patch.targets}
    code = {
        name: detection_module().fingerprint(raw_slot(*place, attribute=target.attribute)) if place else None
        for name, (target, place) in {name: (target, slot(target)) for name, target in targets.items()}.items()
    }
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
