"""What the other tests here trust to see every difference sees it, also right after it saw none."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from tests.contract import observation
from tests.contract.observation import Snapshot, modules_loaded


def function() -> types.FunctionType:
    """A new one each time."""

    def something() -> None: ...

    return something  # type: ignore[return-value]


def ours() -> types.FunctionType:
    found = function()
    vars(found)["__gemma4_compat__"] = "some-patch"
    return found


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of a fake library with a function and a class, the only library there is.

    What other tests imported into this process is left out: the real libraries may be patched in it.
    """
    others = {id(module) for module in modules_loaded() if module.__name__ != __name__}
    monkeypatch.setattr(
        observation, "modules_loaded", lambda: [module for module in modules_loaded() if id(module) not in others]
    )
    module: Any = types.ModuleType("fakelib.core")
    module.double, module.value = function(), 1
    module.Layer = type("Layer", (), {"forward": function(), "make": staticmethod(function())})
    monkeypatch.setitem(sys.modules, "fakelib.core", module)
    monkeypatch.setattr(observation, "LIBRARIES", ("fakelib",))
    return module


def replace(core: Any) -> None:
    core.double = function()


def replace_method(core: Any) -> None:
    core.Layer.forward = function()


def replace_static_method(core: Any) -> None:
    core.Layer.make = staticmethod(function())


def remove(core: Any) -> None:
    del core.Layer.forward


def add(core: Any) -> None:
    core.triple = function()


def take_ours(core: Any) -> None:
    sys.modules[__name__].taken = ours()  # type: ignore[attr-defined]


CHANGES: dict[Callable[[Any], None], str] = {
    replace: "fakelib.core.double",
    replace_method: "fakelib.core.Layer.forward",
    replace_static_method: "fakelib.core.Layer.make",
    remove: "fakelib.core.Layer.forward",
    add: "fakelib.core.triple",
    take_ours: f"{__name__}.taken",
}


@pytest.mark.parametrize("looks", [0, 1, 2])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_is_seen_however_often_nothing_was(
    core: Any, change: Callable[[Any], None], looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "taken", None, raising=False)
    snapshot = Snapshot()
    for _ in range(looks):
        assert snapshot.differences() == []
    change(core)
    for _ in range(2):
        assert snapshot.differences() == [CHANGES[change]]


def test_a_module_that_came_with_a_function_of_ours_is_seen(core: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = Snapshot()
    assert snapshot.differences() == []
    module: Any = types.ModuleType("late")
    module.name = ours()
    monkeypatch.setitem(sys.modules, "late", module)
    assert snapshot.differences() == ["late.name"]


def test_what_is_put_back_is_no_difference(core: Any) -> None:
    snapshot, before = Snapshot(), core.double
    assert snapshot.differences() == []
    core.double = ours()
    assert snapshot.differences() == ["fakelib.core.double"]
    core.double = before
    core.value = 2  # no function
    assert snapshot.differences() == []
