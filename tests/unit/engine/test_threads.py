"""Several threads import, arm and undo at the same time. What may happen once in a thousand runs is made to happen."""

from __future__ import annotations

import _imp
import gc
import importlib
import importlib.util
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import pytest

from gemma4_compat import Gemma4CompatError, Gemma4CompatWarning, Patch, PatchState
from gemma4_compat._engine import hooks
from gemma4_compat._engine.engine import Engine
from gemma4_compat._engine.io import notice
from gemma4_compat._engine.patch import LatePatch
from tests.helpers import CORE, Library, installed, is_ours, raw

ID = "fakelib-double"
PATIENCE = 20  # seconds after which a thread has hung


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


def test_a_module_that_another_thread_is_importing_is_left_alone_until_it_is_complete(
    create: Callable[..., Library], thread: Callable[..., threading.Thread]
) -> None:
    library = create(core=CORE + "import LIBRARY\nLIBRARY.arm()\nAT_ITS_END = double(1)\n")
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


class Loader:
    """A module's own, which does something once the module is found, and before it is in sys.modules."""

    def __init__(self, loader: Any, action: Callable[[], Any]) -> None:
        self.loader, self.action = loader, action

    def create_module(self, _spec: ModuleSpec) -> None:
        self.action()

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)


def while_imported(monkeypatch: pytest.MonkeyPatch, name: str, moment: str, action: Callable[[], Any]) -> None:
    """Do something when the finder of import hooks was asked for a module, and it is not in sys.modules yet."""

    class Finder:
        def find_spec(self, fullname: str, path: Any = None, _target: Any = None) -> ModuleSpec | None:
            if fullname != name:
                return None
            if moment == "looked for":
                action()
                return None
            spec = PathFinder.find_spec(name, path)
            assert spec is not None
            spec.loader = Loader(spec.loader, action)  # type: ignore[assignment]  # as much of one as is needed
            return spec

    position = sys.meta_path.index(PathFinder)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path[:position], Finder(), *sys.meta_path[position:]])


def looked_for(
    library: Library,
    thread: Callable[..., threading.Thread],
    monkeypatch: pytest.MonkeyPatch,
    *patches: Patch,
    moment: str = "looked for",
) -> Engine:
    """An engine that another thread arms while the module is looked for: import hooks were asked already."""
    engine = Engine(patches or [library.patch()])
    arm: Callable[[], Any] = lambda: thread(engine.install).join(PATIENCE)  # noqa: E731
    while_imported(monkeypatch, f"{library.name}.core", moment, arm)
    return engine


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python whose imports do not tell which modules they have locked."""
    monkeypatch.setattr(hooks, "_locks", None)


@pytest.mark.parametrize("moment", ["looked for", "found"])
def test_a_module_that_another_thread_is_looking_for_is_patched_when_its_import_ends(
    library: Library, thread: Callable[..., threading.Thread], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    engine = looked_for(library, thread, monkeypatch, moment=moment)
    assert library.load().double(2) == ("patched", 4)
    assert applied(engine)
    assert not engine.status()[ID].late
    engine.revert()
    assert library.load().double(2) == 4


@pytest.mark.parametrize("moment", ["looked for", "found"])
def test_eight_threads_arm_while_the_last_module_is_looked_for(
    create: Callable[..., Library],
    thread: Callable[..., threading.Thread],
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
) -> None:
    """All of them have looked, and it was not there; and nothing is imported after it."""
    library = create(other=CORE)
    engine = Engine([library.patch(library.target(), library.target("triple", module="other"))])

    def arm() -> None:
        for item in [thread(engine.install) for _ in range(8)]:
            item.join(PATIENCE)
        assert engine.status()[ID].state is PatchState.PENDING

    while_imported(monkeypatch, f"{library.name}.other", moment, arm)
    core, other = library.load(), library.load("other")
    assert (core.double(2), other.triple(2)) == (("patched", 4), ("patched", 6))
    assert applied(engine)


@pytest.fixture
def adding(library: Library, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``adding(before=f, after=g)``: f and g run around the registering of a callback for the library's core."""
    add = hooks._finder.add

    def slowly(before: Callable[[], Any] = lambda: None, after: Callable[[], Any] = lambda: None) -> None:
        def slow(name: str, callback: Any) -> None:
            ours = name == f"{library.name}.core"
            if ours:
                before()
            add(name, callback)
            if ours:
                after()

        monkeypatch.setattr(hooks._finder, "add", slow)

    return slowly


@pytest.mark.parametrize("moment", ["before", "after"])
def test_who_has_armed_need_not_wait_for_another_thread_that_does(
    library: Library, adding: Callable[..., None], moment: str
) -> None:
    engine = Engine([library.patch()])
    begun, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        if threading.current_thread() is first:
            begun.set()
            assert go_on.wait(PATIENCE)

    adding(**{moment: pause})
    first = threading.Thread(target=engine.install, daemon=True)
    first.start()
    assert begun.wait(PATIENCE)
    engine.install()
    assert library.load().double(2) == ("patched", 4), "install() has returned"
    go_on.set()
    first.join(PATIENCE)
    assert not first.is_alive()
    assert applied(engine)
    assert library.load().double(2) == ("patched", 4), "once"


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_import_that_begins_and_ends_while_its_callback_is_registered(
    library: Library, thread: Callable[..., threading.Thread], adding: Callable[..., None], moment: str
) -> None:
    adding(**{moment: lambda: thread(library.load).join(PATIENCE)})
    engine = installed(library.patch())
    assert applied(engine)
    assert library.load().double(2) == ("patched", 4)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_import_that_begins_while_its_callback_is_registered_and_ends_later(
    create: Callable[..., Library], thread: Callable[..., threading.Thread], moment: str, monkeypatch: Any
) -> None:
    library = create(core=CORE + "import LIBRARY\nLIBRARY.half_way()\n")
    half_way, go_on, add = threading.Event(), threading.Event(), hooks._finder.add
    vars(importlib.import_module(library.name))["half_way"] = lambda: (half_way.set(), go_on.wait(PATIENCE))

    def begin(name: str, callback: Any) -> None:
        if moment == "after":
            add(name, callback)
        thread(library.load)
        assert half_way.wait(PATIENCE)
        if moment == "before":
            add(name, callback)

    monkeypatch.setattr(hooks._finder, "add", begin)
    engine = Engine([library.patch()])
    engine.install()
    assert engine.status()[ID].state is PatchState.PENDING
    go_on.set()
    assert library.load().double(2) == ("patched", 4)
    assert applied(engine)
    assert not engine.status()[ID].late


def test_a_package_that_imports_its_module_while_another_thread_does(
    create: Callable[..., Library], thread: Callable[..., threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finder that waits for the package, with the lock of the module, makes both wait for ever."""
    library = create()
    library.write("__init__", "import signals_of_LIBRARY as s\ns.half_way()\nfrom LIBRARY import core\n")
    half_way, signals = threading.Event(), ModuleType(f"signals_of_{library.name}")
    name = f"{library.name}.core"

    def wait() -> None:
        half_way.set()
        until = time.monotonic() + PATIENCE
        while hooks._lock(name) is None and name not in sys.modules and time.monotonic() < until:
            time.sleep(0.01)

    vars(signals)["half_way"] = wait
    monkeypatch.setitem(sys.modules, signals.__name__, signals)
    engine = installed(library.patch())
    package = thread(importlib.import_module, library.name)
    assert half_way.wait(PATIENCE)
    module = thread(importlib.import_module, name)
    for item in (package, module):
        item.join(PATIENCE)
        assert not item.is_alive(), "deadlock"
    assert applied(engine)
    assert library.load().double(2) == ("patched", 4)


def test_two_engines_are_armed_while_one_module_is_looked_for(
    library: Library, thread: Callable[..., threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = [Engine([library.patch()]), Engine([library.patch(library.target("triple"), id="fakelib-triple")])]

    def arm() -> None:
        for item in [thread(engine.install) for engine in engines]:
            item.join(PATIENCE)

    while_imported(monkeypatch, f"{library.name}.core", "found", arm)
    core = library.load()
    assert (core.double(2), core.triple(2)) == (("patched", 4), ("patched", 6))


def test_an_import_that_fails_after_it_was_looked_for_is_retried_by_the_next(
    create: Callable[..., Library], thread: Callable[..., threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = create(core="raise ImportError('not today')\n")
    engine = looked_for(library, thread, monkeypatch, library.patch(library.target(source=CORE)))
    with pytest.raises(ImportError, match="not today"):
        library.load()
    monkeypatch.undo()
    sys.path.insert(0, str(library.folder))
    library.write("core", CORE)
    try:
        assert library.load().double(2) == ("patched", 4)
    finally:
        sys.path.remove(str(library.folder))
    assert applied(engine)


def test_a_module_that_was_being_looked_for_and_imports_others(
    create: Callable[..., Library], thread: Callable[..., threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = create(core=CORE + "import LIBRARY.other\nAT_ITS_END = double(1)\n", other="import LIBRARY.core\n")
    engine = looked_for(library, thread, monkeypatch)
    core = library.load()
    assert core.AT_ITS_END == 2, "the half-built module was patched"
    assert core.double(2) == ("patched", 4)
    assert not engine.status()[ID].late


def test_strict_an_import_of_what_was_being_looked_for_fails_itself(
    library: Library, thread: Callable[..., threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMMA4_COMPAT_STRICT", "1")
    library.write("other", "")
    looked_for(library, thread, monkeypatch, library.patch(library.target(known={"0" * 12: "0.9"})))
    for _ in range(2):
        with pytest.raises(Gemma4CompatError, match="was not applied"):
            library.load()
        assert f"{library.name}.core" not in sys.modules, "else the next import would find it"
        assert not hasattr(sys.modules[library.name], "core"), "so would `from library import core`"
        library.load("other")


@pytest.mark.usefixtures("without_locks")
@pytest.mark.parametrize("noticed_by", ["install", "the next import"])
def test_without_locks_a_module_that_was_being_looked_for_is_noticed_later(
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


@pytest.mark.usefixtures("without_locks")
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


def put_by_hand(library: Library) -> Any:
    """The library's core, put into sys.modules without an import."""
    name = f"{library.name}.core"
    spec = PathFinder.find_spec(name, importlib.import_module(library.name).__path__)
    assert spec is not None
    assert spec.loader is not None
    core: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(core)
    sys.modules[name] = core
    return core


def test_no_file_is_imported_while_the_lock_of_all_imports_is_held(library: Library) -> None:
    """A thread that imports the file has the lock of that module, and waits for the one of all imports."""
    held: list[bool] = []

    def load() -> Patch:
        held.append(_imp.lock_held())
        return library.patch()

    engine = Engine([LatePatch(id=ID, modules=(f"{library.name}.core",), load=load)])
    engine.install()
    core = put_by_hand(library)
    library.write("other", "")
    library.load("other")
    assert core.double(2) == ("patched", 4)
    assert held == [False]


def ending(library: Library, module: str, action: Callable[[], Any]) -> None:
    """Do something after the engine's callback for a module, while the import system has it out of sys.modules: it
    takes every module out and puts it back at the end.
    """

    def callback(name: str, _own: bool) -> None:
        found = sys.modules.pop(name)
        action()
        sys.modules[name] = found

    hooks.when_imported(f"{library.name}.{module}", callback)


def test_two_threads_end_the_imports_of_two_modules(
    create: Callable[..., Library], thread: Callable[..., threading.Thread]
) -> None:
    library = create(other=CORE)
    engine = installed(library.patch(library.target(), library.target("triple", module="other")))
    ending(library, "core", lambda: thread(library.load, "other").join(PATIENCE))
    core = library.load()
    assert applied(engine)
    assert (core.double(2), library.load("other").triple(2)) == (("patched", 4), ("patched", 6))


def test_another_import_ends_between_the_decision_and_the_end_of_this_one(
    create: Callable[..., Library], thread: Callable[..., threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = create(other=CORE)
    fails = library.patch(library.target("Layer.forward", known={"0" * 12: "0.9"}), id="fakelib-fails")
    engine = installed(library.patch(library.target(), library.target("triple", module="other")), fails)
    said = lambda *_: thread(library.load, "other").join(PATIENCE)  # noqa: E731  # the engine's lock is released
    monkeypatch.setattr(notice, "warn", said)
    core = library.load()
    assert applied(engine)
    assert (core.double(2), library.load("other").triple(2)) == (("patched", 4), ("patched", 6))


def test_two_threads_end_the_imports_of_two_groups(
    create: Callable[..., Library], thread: Callable[..., threading.Thread]
) -> None:
    library = create(other=CORE)
    engine = installed(library.patch(library.target(group="one"), library.target(module="other", group="two")))
    ending(library, "core", lambda: thread(library.load, "other").join(PATIENCE))
    core = library.load()
    assert engine.status()[ID].reason.count("not in") == 0
    assert (core.double(2), library.load("other").double(2)) == (("patched", 4), ("patched", 4))
    engine.revert()
    assert (core.double(2), library.load("other").double(2)) == (4, 4)


def test_reverted_and_armed_while_another_thread_ends_the_import(
    library: Library, thread: Callable[..., threading.Thread]
) -> None:
    engine = installed(library.patch())

    def again() -> None:
        engine.revert()
        engine.install()

    ending(library, "core", lambda: thread(again).join(PATIENCE))
    assert library.load().double(2) == ("patched", 4)
    assert applied(engine)


@pytest.mark.parametrize("imported", [False, True], ids=["while it is imported", "while it is armed"])
def test_reverted_by_another_thread_before_it_is_decided(
    library: Library, thread: Callable[..., threading.Thread], imported: bool
) -> None:
    """The file of the patch is being imported; whoever is last has his way."""
    begun, go_on = threading.Event(), threading.Event()

    def load() -> Patch:
        if not begun.is_set():
            begun.set()
            assert go_on.wait(PATIENCE)
        return library.patch()

    engine = Engine([LatePatch(id=ID, modules=(f"{library.name}.core",), load=load)])
    if imported:
        library.load()
        first = thread(engine.install)
    else:
        engine.install()
        first = thread(library.load)
    assert begun.wait(PATIENCE)
    assert engine.revert()[ID].state is PatchState.REVERTED
    go_on.set()
    first.join(PATIENCE)
    assert engine.status()[ID].state is PatchState.REVERTED
    assert library.load().double(2) == 4
    engine.install()
    assert applied(engine)
    assert engine.revert()[ID].state is PatchState.REVERTED
    assert library.load().double(2) == 4


def test_a_garbage_collection_adds_names_to_modules_that_are_searched(create: Callable[..., Library]) -> None:
    """As finalizers do, and other threads, which may run then."""
    library = create(api="from LIBRARY.core import double as twice\n" + "".join(f"N{n} = {n}\n" for n in range(2000)))
    core, api = library.load(), library.load("api")
    numbers = itertools.count()

    def add(phase: str, _info: Any) -> None:
        vars(api)[f"{phase}{next(numbers)}"] = None

    threshold = gc.get_threshold()
    gc.callbacks.append(add)
    gc.set_threshold(5)
    try:
        engine = installed(library.patch())
        assert api.twice(2) == ("patched", 4)
        engine.revert()
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(add)
    assert api.twice is core.double
    assert not is_ours(core.double)


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
