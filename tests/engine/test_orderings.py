"""Whenever the engine is armed, before, between, after or in the middle of imports, the outcome is the same."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from types import SimpleNamespace
from typing import Any

import pytest

from gemma4_compat import Gemma4CompatError, Gemma4CompatWarning, Patch, PatchState
from gemma4_compat._engine import hooks
from gemma4_compat._engine.engine import Engine
from tests.helpers import CORE, Library, installed, is_ours, raw

ID = "fakelib-double"
CALLS_ARM = CORE + "import LIBRARY\nLIBRARY.arm()\nAT_ITS_END = double(1)\n"
PATIENCE = 20  # seconds after which a thread has hung


def armed_in_the_middle(library: Library, *patches: Any) -> list[Engine]:
    """Arrange that the body of the library's core (:data:`CALLS_ARM`) arms an engine; it will be in the list."""
    engines: list[Engine] = []
    package = importlib.import_module(library.name)
    vars(package)["arm"] = lambda: engines.append(installed(*(patches or (library.patch(),))))
    return engines


def applied(engine: Engine) -> bool:
    return engine.status()[ID].state is PatchState.APPLIED


@pytest.fixture
def thread() -> Iterator[Callable[..., threading.Thread]]:
    """``thread(f)``: run ``f`` in a thread, which must end."""
    started: list[threading.Thread] = []

    def start(function: Callable[..., Any], *arguments: Any) -> threading.Thread:
        started.append(threading.Thread(target=function, args=arguments, daemon=True))
        started[-1].start()
        return started[-1]

    yield start
    for item in started:
        item.join(PATIENCE)
        assert not item.is_alive(), "deadlock"


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


def test_a_module_that_another_thread_is_importing_is_left_alone_until_it_is_complete(
    create: Callable[..., Library], thread: Callable[..., threading.Thread]
) -> None:
    library = create(core=CALLS_ARM)
    halfway, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        halfway.set()
        assert go_on.wait(PATIENCE)

    vars(importlib.import_module(library.name))["arm"] = wait
    importing = thread(library.load)
    assert halfway.wait(PATIENCE)
    engine = installed(library.patch())
    half_built = raw(sys.modules[f"{library.name}.core"], "double")
    assert not is_ours(half_built)
    assert engine.status()[ID].state is PatchState.PENDING
    go_on.set()
    importing.join(PATIENCE)
    assert applied(engine)
    assert library.load().AT_ITS_END == 2
    assert library.load().double(2) == ("patched", 4)


def looked_for(
    library: Library, thread: Callable[..., threading.Thread], monkeypatch: pytest.MonkeyPatch, *patches: Patch
) -> Engine:
    """An engine that is armed while the module is looked for: the finder of import hooks was asked already."""
    engine = Engine(patches or [library.patch()])

    class SlowFinder:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == f"{library.name}.core":
                thread(engine.install).join(PATIENCE)

    position = sys.meta_path.index(PathFinder)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path[:position], SlowFinder(), *sys.meta_path[position:]])
    return engine


@pytest.mark.parametrize("noticed_by", ["install", "the next import"])
def test_a_module_that_another_thread_is_looking_for_is_not_missed(
    library: Library,
    thread: Callable[..., threading.Thread],
    monkeypatch: pytest.MonkeyPatch,
    noticed_by: str,
) -> None:
    library.write("other", "")
    engine = looked_for(library, thread, monkeypatch)
    core = library.load()
    status = engine.status()[ID]
    assert (status.state, core.double(2)) == (PatchState.PENDING, 4)
    assert "; install() applies it now" in status.reason
    if noticed_by == "install":
        engine.install()
    else:
        library.load("other")
    assert applied(engine)
    assert engine.status()[ID].late
    assert core.double(2) == ("patched", 4)


def test_a_module_that_was_being_looked_for_is_noticed_by_what_it_imports(
    create: Callable[..., Library], thread: Callable[..., threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = create(core=CORE + "import LIBRARY.other\n", other="")
    engine = looked_for(library, thread, monkeypatch)
    assert library.load().double(2) == ("patched", 4)
    assert not engine.status()[ID].late


def test_strict_an_import_that_notices_another_does_not_fail_for_it(
    library: Library, thread: Callable[..., threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMMA4_COMPAT_STRICT", "1")
    library.write("other", "")
    engine = looked_for(library, thread, monkeypatch, library.patch(library.target(known={"0" * 12: "0.9"})))
    library.load()
    with pytest.warns(Gemma4CompatWarning, match="was not applied"):
        library.load("other")
    with pytest.raises(Gemma4CompatError, match="was not applied"):
        engine.install()


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


def test_an_import_that_ends_while_it_is_asked_for_its_end(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = library.load().__spec__
    monkeypatch.setattr(hooks, "is_initializing", lambda _name: True)  # it was, a moment ago
    assert not hooks._at_end(spec.name, lambda _name, _own: None)
    assert type(spec) is ModuleSpec


def test_eight_threads_arm_while_one_imports(
    create: Callable[..., Library], thread: Callable[..., threading.Thread]
) -> None:
    for _ in range(5):
        library = create(other=CORE)
        engine = Engine([library.patch(library.target(), library.target("triple", module="other"))])
        start = threading.Barrier(9)

        def arm(engine: Engine = engine, start: threading.Barrier = start) -> None:
            start.wait(PATIENCE)
            engine.install()

        def use(library: Library = library, start: threading.Barrier = start) -> None:
            start.wait(PATIENCE)
            library.load()
            library.load("other")

        for item in [thread(use), *(thread(arm) for _ in range(8))]:
            item.join(PATIENCE)
        assert applied(engine)
        assert library.load().double(2) == ("patched", 4), "once, not once a thread"
        assert library.load("other").triple(2) == ("patched", 6)
        engine.revert()
        assert library.load().double(2) == 4
