"""What the registry refuses when it is loaded."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from types import ModuleType

import pytest

from gemma4_compat.patches import registry
from tests.helpers import Library


def test_every_file_in_the_folder_is_registered_once() -> None:
    folder = importlib.import_module("gemma4_compat.patches")  # the package's attribute of that name is a function
    files = [item.name for item in pkgutil.iter_modules(folder.__path__)]
    assert sorted(registry.PATCHES) == sorted(files)


def test_a_patch_whose_id_is_not_its_files_name_is_refused(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("gemma4_compat.patches.fakelib_other")
    vars(module)["PATCH"] = library.patch(id="fakelib-double")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(registry, "PATCHES", ("fakelib_other",))
    with pytest.raises(ValueError, match=r"patches/fakelib_other.py holds the patch 'fakelib-double'"):
        registry.load()


def test_a_patch_registered_before_one_that_it_comes_after_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    dependent = [patch for patch in registry.load() if patch.after]
    assert dependent
    monkeypatch.setattr(registry, "PATCHES", tuple(reversed(registry.PATCHES)))
    with pytest.raises(ValueError, match=f"after names {dependent[-1].after[0]}, which is not registered before it"):
        registry.load()
