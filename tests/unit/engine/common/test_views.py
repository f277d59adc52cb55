"""Views of objects: what is the object's, what is the view's, and what nobody can do with a view."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest

from gemma4_compat._engine.runtime.proxies import Proxy
from gemma4_compat._engine.runtime.views import PlainView


class Base:
    def kind(self) -> str:
        return "base"


class Thing(Base):
    size = 3

    def __init__(self) -> None:
        self.name = "thing"

    def kind(self) -> str:
        return super().kind() + " thing"

    def call(self, one: int, *, other: int = 2) -> int:
        return one + other


class Passing(Proxy):
    def __init__(self, of: Any, own: int) -> None:
        super().__init__(of)
        self._self_own = own

    def __call__(self) -> int:
        return self._self_own

    def call(self, *, named: int = 0) -> int:
        return named


def test_what_a_plain_view_is() -> None:
    thing = Thing()
    view: Any = PlainView(thing, size=5)
    assert (view.size, view.name, view.kind()) == (5, "thing", "base thing")
    view.name = "the view's"
    assert thing.name == "thing"
    with pytest.raises(AttributeError, match="absent"):
        view.absent  # noqa: B018
    assert copy.copy(view).size == 5
    assert copy.deepcopy(view)._of is not thing
    assert pickle.loads(pickle.dumps(view)).name == "the view's"


def test_what_a_proxy_is() -> None:
    thing = Thing()
    view: Any = Passing(thing, 7)
    assert isinstance(view, Thing)
    assert type(view) is Passing
    assert {"name", "kind", "size"} <= set(dir(view))
    assert (view.name, view(), view.call(named=4)) == ("thing", 7, 4)
    assert list(inspect.signature(view.call).parameters) == ["named"]
    assert Thing.kind(view) == "base thing"  # whose `super()` refuses what is no Thing
    view.name = "set through"
    assert thing.name == "set through"
    assert not hasattr(thing, "_self_own")
    with pytest.raises(AttributeError, match="absent"):
        view.absent  # noqa: B018


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_proxy_is_not_copied(how: Any) -> None:
    with pytest.raises(NotImplementedError):
        how(Passing(Thing(), 7))


def test_what_is_compiled_sees_through_a_plain_view() -> None:
    pytest.importorskip("torch")
    import torch

    class Scaled(torch.nn.Module):  # type: ignore[misc]
        by = 2

        def forward(self, states: Any) -> Any:
            view = PlainView(self, more=3)
            return states * view.by * view.more

    compiled = torch.compile(Scaled(), fullgraph=True, backend="eager")
    assert compiled(torch.ones(1)).item() == 6
