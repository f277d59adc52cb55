"""Holders of a function from before it was replaced: modules are reached under any name, other objects are counted."""

from __future__ import annotations

import functools
import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from gemma4_compat._engine import changes, holders
from tests.helpers import CORE, Library, installed, raw, tagged, traces

ID = "fakelib-double"
TAKERS = {
    "a registry": "from LIBRARY import core\nTAKEN = {'double': core.double}\ncall = lambda: TAKEN['double'](2)\n",
    "a list": "from LIBRARY import core\nTAKEN = [core.double]\ncall = lambda: TAKEN[0](2)\n",
    "a class attribute": (
        "from LIBRARY import core\nclass Taker:\n    run = staticmethod(core.double)\ncall = lambda: Taker.run(2)\n"
    ),
    "a default": "from LIBRARY import core\ndef call(run=core.double):\n    return run(2)\n",
    "a closure": "from LIBRARY import core\ncall = (lambda run: lambda: run(2))(core.double)\n",
    "a partial": "import functools\nfrom LIBRARY import core\ncall = functools.partial(core.double, 2)\n",
}


def unreached(engine: Any) -> int:
    status = engine.status(count=True)[ID]
    said = f"; places that took what it replaces before, and call the original: {status.unreached}"
    assert status.reason.endswith(said) == (status.unreached > 0), status.reason
    found: int = status.unreached
    return found


def test_a_module_that_took_a_function_under_another_name_gets_the_repair(create: Callable[..., Library]) -> None:
    library = create(api="from LIBRARY.core import double as twice\n")
    core, api = library.load(), library.load("api")
    original = core.double
    engine = installed(library.patch())
    assert api.twice is core.double
    assert api.twice(2) == ("patched", 4)
    engine.revert()
    assert raw(api, "twice") is original
    engine.install()
    assert api.twice(2) == ("patched", 4)
    del original
    assert unreached(engine) == 0


def test_of_two_patches_on_one_function_a_module_gets_both(create: Callable[..., Library]) -> None:
    library = create(api="from LIBRARY.core import double as twice\n")
    core, api = library.load(), library.load("api")
    engine = installed(library.patch(), library.patch(library.target(), id="fakelib-upper"))
    assert api.twice is core.double
    assert api.twice(2) == ("patched", ("patched", 4))
    engine.revert(ID)
    assert core.double(2) == api.twice(2) == ("patched", 4)
    engine.revert()
    assert core.double(2) == api.twice(2) == 4
    assert not traces([library.name])


def test_the_order_of_imports_makes_no_difference_to_the_names_of_any_module(create: Callable[..., Library]) -> None:
    """The module's own second name leads past a patch that was there first, too."""

    def outcome(*, late: bool) -> list[Any]:
        library = create(core=CORE + "also = double\n", api="from LIBRARY.core import double as twice, also\n")
        engine = None if late else installed(library.patch(library.target(source=CORE)))
        core, api = library.load(), library.load("api")
        engine = engine or installed(library.patch(library.target(source=CORE)))
        assert engine.status(count=True)[ID].late == late
        return [core.double(2), core.also(2), api.twice(2)]

    assert outcome(late=False) == outcome(late=True) == [("patched", 4), 4, ("patched", 4)]


@pytest.mark.parametrize("what", TAKERS)
def test_what_cannot_be_reached_is_counted_in_the_reason(create: Callable[..., Library], what: str) -> None:
    library = create(api=TAKERS[what])
    api = library.load("api")
    engine = installed(library.patch())
    assert api.call() == 4, "it keeps the original"
    assert unreached(engine) >= 1
    vars(api).clear()
    gc.collect()
    assert unreached(engine) == 0, "who has it now counts, not who had it"


@pytest.mark.parametrize("name", ["Layer.forward", "Layer.scale", "Layer.make"])
def test_methods_are_counted_whatever_their_kind(library: Library, name: str) -> None:
    core = library.load()
    kept = [getattr(core.Layer(), name.partition(".")[2]) for _ in range(3)]
    engine = installed(library.patch(library.target(name)))
    # A static method is one function, and the list holds it; each of the others is an object of its own.
    assert unreached(engine) == (1 if name == "Layer.scale" else 3)
    del kept
    assert unreached(engine) == 0


def test_a_base_that_keeps_its_own_method_is_no_place_that_was_missed(library: Library) -> None:
    library.load()
    engine = installed(library.patch(library.target("Special.forward", proven_on="Layer.forward")))
    assert unreached(engine) == 0


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("names", [["double"], ["Layer.forward", "Layer.scale", "Layer.make", "double", "triple"]])
def test_what_is_needed_to_replace_and_to_undo_is_not_counted(
    create: Callable[..., Library], names: list[str], late: bool
) -> None:
    library = create(api="from LIBRARY.core import double, triple\n")
    patches = [library.patch(*map(library.target, names), id=patch_id) for patch_id in (ID, "fakelib-upper")]
    if late:
        library.load("api")
    engine = installed(*patches)
    library.load("api")
    assert unreached(engine) == 0
    for patch_id in (ID, "fakelib-upper", None):
        engine.revert(patch_id)
        engine.install()
        assert unreached(engine) == 0


def test_a_function_that_calls_itself_does_not_count_for_itself(create: Callable[..., Library]) -> None:
    core = "def make():\n    def count(n):\n        return n and 1 + count(n - 1)\n    return count\ncount = make()\n"
    library = create(core=core)
    library.load()
    changed = changes.ChangeSet(ID)
    changed.replace(f"{library.name}.core", "count", tagged)
    assert holders.unreached({"": changed}) == {"": 0}
    assert changed.undo() == ()


def test_a_call_that_is_going_on_is_no_place(library: Library) -> None:
    core = library.load()
    found: list[int] = []

    def asks(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    engine = installed(library.patch(library.target(replacement=asks)))

    class Asks(int):
        def __mul__(self, _other: object) -> Any:
            found.append(unreached(engine))
            return 0

    core.double(Asks(2))
    assert found == [0]


def test_the_heap_is_searched_only_where_a_reference_count_says_that_somebody_has_it(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        pytest.skip("reference counts say nothing without the GIL")
    core = library.load()
    kept = functools.partial(core.double, 2)
    searches = []
    monkeypatch.setattr(holders.gc, "get_referrers", lambda *of: searches.append(of) or [])
    engine = installed(library.patch(), library.patch(library.target("triple"), id="fakelib-triple"))
    engine.status(count=True)
    before = len(searches)
    assert before
    del kept, searches[:]
    engine.status(count=True)
    assert not searches


def test_a_search_takes_well_under_a_second_for_a_million_objects(library: Library) -> None:
    core = library.load()
    heap = [[] for _ in range(1_000_000)]  # type: ignore[var-annotated]
    kept = [core.double]
    engine = installed(library.patch())
    start = time.perf_counter()
    assert unreached(engine) == 1
    assert time.perf_counter() - start < 2
    assert len(heap) == 1_000_000
    del kept
