"""What is installed dormant costs nothing until it is needed, and then works everywhere."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gemma4_compat._engine import changes, dormant
from gemma4_compat._engine.engine import Engine
from gemma4_compat._engine.patch import PatchState
from tests.helpers import Library


@pytest.fixture(autouse=True)
def _nothing_is_activated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(changes, "_activated", set())
    yield
    dormant.show()


def dormant_patch(library: Library) -> Any:
    return library.patch(dataclasses.replace(library.target("Layer.forward"), dormant=lambda late: True))


def test_upstreams_own_function_is_in_its_place_until_it_is_needed(library: Library) -> None:
    module = library.load()
    own = vars(module.Layer)["forward"]
    patch = dormant_patch(library)
    engine = Engine([patch])
    engine.install()
    assert engine.status()[patch.id].state is PatchState.APPLIED
    assert vars(module.Layer)["forward"] is own
    dormant.activate(patch.id)
    assert changes.is_on(vars(module.Layer)["forward"], patch.id)
    assert engine.status()[patch.id].overridden == ()
    engine.revert()
    assert vars(module.Layer)["forward"] is own


def calls(run: Callable[[], Any]) -> int:
    """Functions of ours that are called to call upstream's."""
    found = 0

    def look(frame: Any, event: str, _argument: Any) -> None:
        nonlocal found
        found += event == "call" and frame.f_code.co_name == "installed"

    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def test_what_is_on_top_passes_it_over_until_it_is_needed(library: Library) -> None:
    module = library.load()
    answer = module.double(2)

    def above(original: Any, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    def below(_original: Any, *_args: Any, **_kwargs: Any) -> Any:
        return "active"

    lower = library.patch(
        dataclasses.replace(library.target("double", below), dormant=lambda late: True), id="dormant"
    )
    engine = Engine([lower, library.patch(library.target("double", above), id="on-top")])
    engine.install()
    assert module.double(2) == answer
    assert calls(lambda: module.double(2)) == 1
    dormant.activate(lower.id)
    assert module.double(2) == "active"
    assert calls(lambda: module.double(2)) == 2
    engine.revert("dormant")
    assert module.double(2) == answer
    engine.install()
    assert module.double(2) == "active"
    engine.revert()
    assert module.double(2) == answer


def test_it_is_active_when_it_is_installed_again(library: Library) -> None:
    module = library.load()
    patch = dormant_patch(library)
    engine = Engine([patch])
    engine.install()
    dormant.activate(patch.id)
    engine.revert()
    engine.install()
    assert changes.is_on(vars(module.Layer)["forward"], patch.id)
    engine.revert()


def test_what_another_library_puts_there_meanwhile_stays_and_is_told(library: Library) -> None:
    module = library.load()
    patch = dormant_patch(library)
    engine = Engine([patch])
    engine.install()
    theirs = module.Layer.forward = lambda self, x: "theirs"
    dormant.activate(patch.id)
    assert vars(module.Layer)["forward"] is theirs
    assert engine.status()[patch.id].overridden
    engine.revert()
    assert vars(module.Layer)["forward"] is theirs


@pytest.mark.parametrize("known", [True, False])
def test_without_the_code_that_activates_it_nothing_is_dormant(library: Library, known: bool) -> None:
    module = library.load()
    own = vars(module.Layer)["forward"]

    def activate(original: Any, *args: Any, **kwargs: Any) -> Any:
        dormant.activate("fakelib-double")
        return original(*args, **kwargs)

    activator = dataclasses.replace(library.target("double", activate), activator=True)
    if not known:
        activator = dataclasses.replace(activator, known={"0" * 12: "1.0"})
    patch = library.patch(dataclasses.replace(library.target("Layer.forward"), dormant=lambda late: True), activator)
    engine = Engine([patch])
    engine.install()
    assert engine.status()[patch.id].state is PatchState.APPLIED
    assert (vars(module.Layer)["forward"] is own) == known
    module.double(2)
    assert changes.is_on(vars(module.Layer)["forward"], patch.id)
    engine.revert()
    assert vars(module.Layer)["forward"] is own
