"""What a patch file says, what the registry adds, and what they refuse."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import sys
from types import ModuleType

import pytest

from gemma4_compat._engine.patch import ActsOn, Kind, LatePatch, Patch, Severity
from gemma4_compat.patches import registry
from tests.helpers import no_reproduction

DOCUMENTATION = """Double is right.

Symptom: silent: double
is wrong.

Cause: nobody knows.

Fix: it is.

Remove when: double is right.
"""

SOURCE = """
from gemma4_compat.patches.api import Patch

PATCH = Patch("F1 F2", severity="crash", affected=">=1,<2", requires="other")

@PATCH.replaces("fakelib.leaf", "double")
@PATCH.replaces("fakelib.leaf", "Layer.double", group="layers", dormant=True)
def double(original, x):
    return 2 * x

@PATCH.replaces("fakelib.leaf", "half", affected="<1.1", optional=True)
def half(original, x):
    return x / 2

for _name in ("third", "quarter"):
    PATCH.replaces("fakelib.leaf", _name)(half)

def reproduce(workspace):
    raise NotImplementedError
"""


def complete() -> Patch:
    return registry.complete("placement.fakelib_double")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of a patch file for a fake library."""
    module = ModuleType("gemma4_compat.patches.placement.fakelib_double", DOCUMENTATION)
    exec(SOURCE, vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(registry.RELEASES, "fakelib", ("0.9", "1.0", "1.1", "2.0"))
    return module


def test_every_file_in_the_folders_is_registered_once() -> None:
    folder = importlib.import_module("gemma4_compat.patches")  # the package's attribute of that name is a function
    areas = [item.name for item in pkgutil.iter_modules(folder.__path__) if item.ispkg]
    files = [
        f"{area}.{item.name}"
        for area in areas
        for item in pkgutil.iter_modules([f"{path}/{area}" for path in folder.__path__])
    ]
    assert sorted(registry.PATCHES) == sorted(files), "run: python tools/fingerprints.py --write"


def test_the_file_says_what_is_replaced_where(module: ModuleType) -> None:
    patch = complete()
    assert (patch.id, patch.distribution) == ("fakelib-double", "fakelib")
    assert (patch.affected, patch.fixed, patch.requires) == (">=1,<2", "2", ("other",))
    assert (patch.kind, patch.severity, patch.acts_on) == (Kind.REPAIR, Severity.CRASH, ActsOn.GEMMA4)
    assert patch.failure_points == ("F1", "F2")
    assert (patch.reproduce, patch.detect) == (module.reproduce, None)
    found = {target.name: (target.replacement, target.group, target.dormant) for target in patch.targets}
    assert found == {
        "double": (module.double, "", False),
        "Layer.double": (module.double, "layers", True),
        "half": (module.half, "", False),
        "third": (module.half, "", False),
        "quarter": (module.half, "", False),
    }
    assert list(found) == ["double", "Layer.double", "half", "third", "quarter"]
    assert (patch.targets[2].affected, patch.targets[2].optional) == ("<1.1", True)


def test_a_function_of_the_file_looks_at_the_loaded_code(module: ModuleType) -> None:
    vars(module)["detect"] = no_reproduction
    assert complete().detect is no_reproduction


@pytest.mark.parametrize(
    "change, error",
    [
        (("crash", "crsh"), "severity 'crsh' is not one of 'crash', 'wrong_result', 'memory', 'speed'"),
        (('"Layer.double"', '"double"'), "replaces fakelib.leaf.double twice"),
        (("_name)(half)", "_name)"), "replaces fakelib.leaf.third, but no function follows `replaces`"),
    ],
)
def test_what_makes_no_sense_is_refused(module: ModuleType, change: tuple[str, str], error: str) -> None:
    def load() -> None:
        exec(SOURCE.replace(*change), vars(module))
        complete()

    with pytest.raises(ValueError, match=error):
        load()


def test_the_docstring_the_folder_and_the_data_say_the_rest(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.KNOWN, "fakelib.leaf.double", {"aa": "0.9, 1.1", "bb": "1.0", "cc": "2.0"})
    patch = complete()
    assert (patch.area, patch.measured) == ("placement", "1.1")
    assert patch.summary == "Double is right."
    assert patch.symptom == "silent: double is wrong."
    assert patch.retire_when == "double is right"
    assert patch.documentation == DOCUMENTATION.strip()
    assert patch.targets[0].known == {"aa": "1.1", "bb": "1.0"}


def test_a_docstring_without_a_section_is_refused(module: ModuleType) -> None:
    module.__doc__ = DOCUMENTATION.replace("Fix: ", "Repair: ")
    with pytest.raises(ValueError, match=r"has the sections \['Symptom', 'Cause', 'Remove when'\]; it must have"):
        complete()


def test_without_docstrings_the_patch_is_there_all_the_same(module: ModuleType) -> None:
    """Under ``python -OO`` there are none."""
    module.__doc__ = None
    assert complete().documentation == ""


def test_a_patch_that_was_not_measured_yet_is_imported_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(registry.MODULES, registry.PATCHES[0])
    first, *others = registry.load()
    assert dataclasses.is_dataclass(first)
    assert not isinstance(first, LatePatch)
    assert {type(other) for other in others} == {LatePatch}


def test_an_area_is_the_folder() -> None:
    assert registry.AREA_OF["peft-keep-dispatch"] == "adapters"
    assert "no-such-patch" not in registry.AREA_OF
