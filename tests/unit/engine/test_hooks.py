"""What else finds and loads modules goes on as before: other import hooks, other loaders, what asks for a spec."""

from __future__ import annotations

import importlib
import importlib.util
import runpy
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

from gemma4_compat._engine import hooks
from tests.helpers import CORE, Library


@pytest.fixture
def called(library: Library) -> list[tuple[str, bool]]:
    """The calls for the library's core."""
    calls: list[tuple[str, bool]] = []
    hooks.when_imported(f"{library.name}.core", lambda name, own: calls.append((name, own)))
    return calls


@pytest.mark.parametrize("first", ["theirs", "ours"])
def test_hooks_of_wrapt_for_the_same_module_are_called_once_and_so_are_ours(
    library: Library, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its finder searches the meta path by itself."""
    wrapt = pytest.importorskip("wrapt")
    name, called = f"{library.name}.core", []
    hooks.when_imported(name, lambda *_: called.append("ours"))
    wrapt.register_post_import_hook(lambda module: called.append("theirs"), name)
    finders = [hooks._finder, next(item for item in sys.meta_path if type(item).__module__.startswith("wrapt"))]
    others = [item for item in sys.meta_path if item not in finders]
    monkeypatch.setattr(sys, "meta_path", [*(finders if first == "ours" else reversed(finders)), *others])
    library.load()
    assert sorted(called) == ["ours", "theirs"]


def test_a_finder_that_searches_the_meta_path_itself(
    library: Library, called: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, inside = f"{library.name}.core", []

    class Finder:
        def find_spec(self, fullname: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
            if fullname != name or inside:
                return None
            inside.append(fullname)
            try:
                return importlib.util.find_spec(fullname)
            finally:
                inside.clear()

    finder = Finder()
    for position in (1, 0):
        monkeypatch.setattr(sys, "meta_path", [item for item in sys.meta_path if item is not finder])
        sys.meta_path.insert(position, finder)
        library.load()
        assert called == [(name, True)]
        called.clear()
        del sys.modules[name]


def test_a_spec_that_somebody_asks_for_calls_nobody_and_reads_as_its_loader(
    library: Library, called: list[Any]
) -> None:
    library.write("core", CORE + "if __name__ == '__main__':\n    RAN = True\n")
    name = f"{library.name}.core"
    spec = importlib.util.find_spec(name)
    assert spec is not None
    loader: Any = spec.loader
    assert "RAN" in loader.get_source(name)
    assert loader.is_package(name) is False
    assert runpy.run_module(name, run_name="__main__")["RAN"]
    assert called == []
    core = library.load()
    assert called == [(name, True)]
    assert type(core.__loader__).__name__ == type(core.__spec__.loader).__name__ == "SourceFileLoader"


class Own:
    """A loader that makes the module itself, as those of extension modules do."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        vars(module)["made"] = True
        return module

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["executed"] = True


class Old:
    """A loader from before ``exec_module``."""

    def load_module(self, name: str) -> ModuleType:
        module = sys.modules[name] = ModuleType(name)
        vars(module).update(made=True, executed=True)
        return module


@pytest.mark.filterwarnings("ignore::ImportWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("loader", [Own, Old])
def test_loaders_that_make_the_module_themselves(
    library: Library, called: list[Any], monkeypatch: pytest.MonkeyPatch, loader: Callable[[], Any]
) -> None:
    name = f"{library.name}.core"

    class Finder:
        def find_spec(self, fullname: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
            return ModuleSpec(name, loader()) if fullname == name else None

    monkeypatch.setattr(sys, "meta_path", [hooks._finder, Finder(), *sys.meta_path])
    if loader is Old and sys.version_info >= (3, 15):
        pytest.skip("Python loads none of these any more")
    core = library.load()
    assert (core.made, core.executed) == (True, True)
    assert called == [(name, True)]


def test_a_namespace_package(library: Library, called: list[Any]) -> None:
    (library.folder / library.name / "core.py").unlink()
    (library.folder / library.name / "core").mkdir()
    importlib.invalidate_caches()
    core = library.load()
    assert getattr(core, "__file__", None) is None
    assert called == [(f"{library.name}.core", True)]
