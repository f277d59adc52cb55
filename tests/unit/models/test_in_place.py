"""A method of one object is replaced for a time, by several at once, which end in any order."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from gemma4_compat._common import in_place


class Layer:
    def merge(self, value: int) -> list[Any]:
        return [value]


def named(name: str) -> Callable[..., Any]:
    return lambda below, *args: [name, *below(*args)]


@pytest.mark.parametrize("order", list(itertools.permutations("abc")))
@pytest.mark.parametrize("has_its_own", [False, True])
def test_each_takes_out_only_itself(order: tuple[str, ...], has_its_own: bool) -> None:
    layer, other = Layer(), Layer()
    own = lambda value: ["own", value]  # noqa: E731
    if has_its_own:
        vars(layer)["merge"] = own
    bottom = layer.merge(1)
    open_ = {}
    for name in "abc":
        stack = open_[name] = contextlib.ExitStack()
        stack.enter_context(in_place.replaced(layer, "merge", named(name)))
    left = ["c", "b", "a"]
    assert layer.merge(1) == [*left, *bottom]
    for name in order:
        open_[name].close()
        left.remove(name)
        assert layer.merge(1) == [*left, *bottom]
    assert vars(layer) == ({"merge": own} if has_its_own else {})
    assert other.merge(1) == [1]


def test_what_was_taken_below_calls_what_lies_there_now() -> None:
    """PEFT's ``inject_adapter`` under two patches: the outer one ends first, by an error."""
    layer = Layer()
    outer = contextlib.ExitStack()
    outer.enter_context(in_place.replaced(layer, "merge", named("outer")))
    with in_place.replaced(layer, "merge", named("inner")):
        outer.close()
        assert layer.merge(1) == ["inner", 1]
    assert not vars(layer)


def test_the_same_replacement_twice() -> None:
    layer, same = Layer(), named("same")
    with in_place.replaced(layer, "merge", same):
        with in_place.replaced(layer, "merge", same):
            assert layer.merge(1) == ["same", "same", 1]
        assert layer.merge(1) == ["same", 1]
    assert not vars(layer)


def test_an_error_leaves_nothing() -> None:
    layer = Layer()
    with pytest.raises(ValueError, match="on purpose"), in_place.replaced(layer, "merge", named("a")):
        raise ValueError("on purpose")
    assert not vars(layer)


def test_what_somebody_else_puts_there_meanwhile_stays() -> None:
    layer = Layer()
    with in_place.replaced(layer, "merge", named("a")):
        theirs = vars(layer)["merge"] = lambda value: ["theirs", value]
    assert vars(layer) == {"merge": theirs}


def test_a_method_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="unmerge"), in_place.replaced(Layer(), "unmerge", named("a")):
        pytest.fail("not reached")
