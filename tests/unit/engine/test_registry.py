"""What the registry refuses, and what it adds to a patch file."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import sys
from types import ModuleType

import pytest

from gemma4_compat._engine.patch import LatePatch
from gemma4_compat.patches import registry
from tests.helpers import Library

DOCUMENTATION = """Double is right.

Symptom: silent: double
is wrong.

Cause: nobody knows.

Fix: it is.

Remove when: double is right.
"""


def late(patch_id: str) -> LatePatch:
    return LatePatch(id=patch_id, modules=(), load=registry._loader(patch_id))


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, library: Library) -> ModuleType:
    """The module of a patch file for a fake library."""
    module = ModuleType("gemma4_compat.patches.placement.fakelib_double", DOCUMENTATION)
    vars(module)["PATCH"] = library.patch(id="fakelib-double")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(registry.AREA_OF, "fakelib-double", "placement")
    monkeypatch.setitem(registry.RELEASES, library.name, ("0.9", "1.0", "1.1", "2.0"))
    return module


def test_every_file_in_the_folders_is_registered_once() -> None:
    folder = importlib.import_module("gemma4_compat.patches")  # the package's attribute of that name is a function
    areas = [item.name for item in pkgutil.iter_modules(folder.__path__) if item.ispkg]
    files = [
        f"{area}.{item.name}"
        for area in areas
        for item in pkgutil.iter_modules([f"{path}/{area}" for path in folder.__path__])
    ]
    assert sorted(registry.PATCHES) == sorted(files)


def test_a_patch_whose_id_is_not_its_files_name_is_refused(module: ModuleType, library: Library) -> None:
    vars(module)["PATCH"] = library.patch(id="fakelib-other")
    with pytest.raises(ValueError, match=r"fakelib_double holds the patch 'fakelib-other'"):
        late("fakelib-double").load()


def test_the_docstring_the_folder_and_the_data_say_the_rest(
    module: ModuleType, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = library.target(known={})
    vars(module)["PATCH"] = library.patch(target, id="fakelib-double", affected=">=1,<2")
    monkeypatch.setitem(registry.KNOWN, str(target), {"aa": "0.9, 1.1", "bb": "1.0", "cc": "2.0"})
    patch = late("fakelib-double").load()
    assert (patch.area, patch.measured) == ("placement", "1.1")
    assert patch.summary == "Double is right."
    assert patch.symptom == "silent: double is wrong."
    assert patch.retire_when == "double is right"
    assert patch.documentation == DOCUMENTATION.strip()
    assert patch.targets[0].known == {"aa": "1.1", "bb": "1.0"}


def test_a_docstring_without_a_section_is_refused(module: ModuleType) -> None:
    module.__doc__ = DOCUMENTATION.replace("Fix: ", "Repair: ")
    with pytest.raises(ValueError, match=r"has the sections \['Symptom', 'Cause', 'Remove when'\]; it must have"):
        late("fakelib-double").load()


def test_without_docstrings_the_patch_is_there_all_the_same(module: ModuleType) -> None:
    """Under ``python -OO`` there are none."""
    module.__doc__ = None
    assert late("fakelib-double").load().documentation == ""


def test_a_patch_that_was_not_measured_yet_is_imported_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patch_id = registry.PATCHES[0].rpartition(".")[2].replace("_", "-")
    monkeypatch.setattr(registry, "MODULES", {name: it for name, it in registry.MODULES.items() if name != patch_id})
    first, *others = registry.load()
    assert dataclasses.is_dataclass(first)
    assert not isinstance(first, LatePatch)
    assert {type(other) for other in others} == {LatePatch}


def test_an_area_is_the_folder() -> None:
    assert registry.area("peft-keep-dispatch") == "adapters"
    with pytest.raises(KeyError):
        registry.area("no-such-patch")
