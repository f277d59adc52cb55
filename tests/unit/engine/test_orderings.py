"""Whenever the engine is armed, before, between, after or in the middle of imports, the outcome is the same."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any

import pytest

from gemma4_compat import PatchState
from gemma4_compat._engine.engine import Engine
from tests.helpers import CORE, Library, installed, raw

ID = "fakelib-double"
CALLS_ARM = CORE + "import LIBRARY\nLIBRARY.arm()\nAT_ITS_END = double(1)\n"


def armed_in_the_middle(library: Library, *patches: Any) -> list[Engine]:
    """Arrange that the body of the library's core (:data:`CALLS_ARM`) arms an engine; it will be in the list."""
    engines: list[Engine] = []
    package = importlib.import_module(library.name)
    vars(package)["arm"] = lambda: engines.append(installed(*(patches or (library.patch(),))))
    return engines


def applied(engine: Engine) -> bool:
    return engine.status()[ID].state is PatchState.APPLIED


def test_known_patches_that_nobody_armed_are_registered(library: Library) -> None:
    engine = Engine([library.patch()])
    assert library.load().double(2) == 4
    assert engine.status()[ID].state is PatchState.REGISTERED


def test_armed_before_the_import(library: Library) -> None:
    engine = installed(library.patch())
    status = engine.status()[ID]
    assert (status.state, status.reason) == (PatchState.PENDING, f"waiting for the import of {library.name}")
    assert f"{library.name}.core" not in sys.modules, "nothing upstream is imported by the engine"
    assert library.load().double(2) == ("patched", 4)
    assert applied(engine)
    assert not engine.status()[ID].late


def test_armed_after_the_import(library: Library) -> None:
    core = library.load()
    engine = installed(library.patch())
    assert core.double(2) == ("patched", 4)
    assert applied(engine)
    assert engine.status()[ID].late


def test_armed_between_the_package_and_its_leaf(library: Library) -> None:
    importlib.import_module(library.name)
    engine = installed(library.patch())
    assert engine.status()[ID].state is PatchState.PENDING
    assert library.load().double(2) == ("patched", 4)
    assert not engine.status()[ID].late


def test_a_patch_waits_for_all_of_its_modules(create: Callable[..., Library]) -> None:
    library = create(other=CORE, api="from LIBRARY.core import double\n")
    engine = installed(library.patch(library.target(), library.target("triple", module="other")))
    core, api = library.load(), library.load("api")
    assert core.double(2) == 4
    assert engine.status()[ID].reason == f"waiting for the import of {library.name}.other"
    assert library.load("other").triple(2) == ("patched", 6)
    assert core.double(2) == api.double(2) == ("patched", 4), "who took the name while the patch waited got it too"


@pytest.mark.parametrize("imported", [False, True])
def test_arming_twice_is_arming_once(library: Library, imported: bool) -> None:
    if imported:
        library.load()
    engine = installed(library.patch())
    engine.install()
    core = library.load()
    first, status = raw(core, "double"), engine.status()[ID]
    engine.install()
    assert raw(core, "double") is first
    assert engine.status()[ID] == status
    assert core.double(2) == ("patched", 4)


def test_a_failed_import_of_the_library_is_retried_by_its_next(create: Callable[..., Library]) -> None:
    library = create(core="raise ImportError('not today')\n")
    engine = installed(library.patch(library.target(source=CORE)))
    with pytest.raises(ImportError, match="not today"):
        library.load()
    assert engine.status()[ID].state is PatchState.PENDING
    library.write("core", CORE)
    assert library.load().double(2) == ("patched", 4)


def test_an_import_blocked_by_none_in_sys_modules_is_not_an_import(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, f"{library.name}.core", None)
    engine = installed(library.patch())
    assert engine.status()[ID].state is PatchState.PENDING


def test_a_half_imported_module_is_patched_when_its_import_ends(create: Callable[..., Library]) -> None:
    library = create(core=CALLS_ARM)
    engines = armed_in_the_middle(library)
    core = library.load()
    assert core.AT_ITS_END == 2, "the half-built module was patched"
    assert core.double(2) == ("patched", 4)
    assert applied(engines[0])
    assert not engines[0].status()[ID].late
    assert type(core.__spec__) is ModuleSpec


def test_two_engines_armed_in_one_half_imported_module(create: Callable[..., Library]) -> None:
    library = create(core=CALLS_ARM + "LIBRARY.arm()\n")
    patches = [library.patch(), library.patch(library.target("triple"), id="fakelib-triple")]
    vars(importlib.import_module(library.name))["arm"] = lambda: installed(patches.pop())
    core = library.load()
    assert (core.double(2), core.triple(2)) == (("patched", 4), ("patched", 6))
    assert type(core.__spec__) is ModuleSpec


def test_a_half_imported_module_that_fails_is_patched_at_its_next_import(create: Callable[..., Library]) -> None:
    library = create(core=CALLS_ARM + "if len(LIBRARY.engines) == 1:\n    raise ImportError('not today')\n")
    engines = armed_in_the_middle(library)
    vars(importlib.import_module(library.name))["engines"] = engines
    with pytest.raises(ImportError, match="not today"):
        library.load()
    engine = engines[0]
    assert engine.status()[ID].state is PatchState.PENDING
    engines.append(engine)  # the second attempt goes on, and arms nothing
    vars(importlib.import_module(library.name))["arm"] = lambda: None
    assert library.load().double(2) == ("patched", 4)
    assert applied(engine)


def test_a_machinery_that_does_not_say_when_an_import_ends_is_asked_again(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.write("other", "")
    core = library.load()
    monkeypatch.setattr(core, "__spec__", SimpleNamespace(_initializing=True))
    engine = installed(library.patch())
    library.load("other")
    assert core.double(2) == 4
    core.__spec__._initializing = False
    library.write("third", "")
    library.load("third")
    assert core.double(2) == ("patched", 4)
    assert applied(engine)
