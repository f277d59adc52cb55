"""Methods and attributes of one object are replaced by several at once, which end in any order."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from gemma4_compat._engine.runtime import in_place


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


# ------------------------------------------------------------------------------------------------- until it is undone


def first(layer: Layer, below: Callable[..., Any], *args: Any) -> list[Any]:
    return ["first", id(layer), *below(*args)]


def second(layer: Layer, below: Callable[..., Any], *args: Any) -> list[Any]:
    return ["second", id(layer), *below(*args)]


def both() -> Layer:
    layer = Layer()
    for function in (first, second):
        in_place.replace(layer, "merge", functools.partial(function, layer))
    return layer


@pytest.mark.parametrize("order", list(itertools.permutations((first, second))))
def test_lasting_ones_are_undone_in_any_order(order: tuple[Any, Any]) -> None:
    layer = both()
    assert layer.merge(1) == ["second", id(layer), "first", id(layer), 1]
    in_place.restore(layer, "merge", order[0])
    assert layer.merge(1) == [order[1].__name__, id(layer), 1]
    in_place.restore(layer, "merge", order[0])  # a second time
    in_place.restore(layer, "merge", order[1])
    assert not vars(layer)


@pytest.mark.parametrize("lasting_first", [False, True])
def test_a_lasting_one_and_one_for_a_time(lasting_first: bool) -> None:
    layer = Layer()
    with contextlib.ExitStack() as stack:
        stack.enter_context(in_place.replaced(layer, "merge", named("a")))
        in_place.replace(layer, "merge", functools.partial(first, layer))
        if lasting_first:
            in_place.restore(layer, "merge", first)
            assert layer.merge(1) == ["a", 1]
    assert layer.merge(1) == ([1] if lasting_first else ["first", id(layer), 1])
    in_place.restore(layer, "merge", first)
    assert not vars(layer)


def test_the_same_function_again_takes_its_own_place() -> None:
    layer = both()
    in_place.replace(layer, "merge", functools.partial(second, layer))
    assert in_place.replacements(vars(layer)["merge"]) == [first, second]


def test_a_deep_copy_has_its_own() -> None:
    layer = both()
    with in_place.replaced(layer, "merge", named("for a time")):
        copied = copy.deepcopy(layer)
    assert copied.merge(1) == ["second", id(copied), "first", id(copied), 1]
    for function in (first, second):
        in_place.restore(copied, "merge", function)
    assert not vars(copied)
    assert layer.merge(1) == ["second", id(layer), "first", id(layer), 1]


def test_what_is_done_to_a_shallow_copy_is_not_done_to_the_original() -> None:
    layer = both()
    copied = copy.copy(layer)
    in_place.restore(copied, "merge", first)
    with in_place.replaced(copied, "merge", named("copy's")):
        assert copied.merge(1) == ["copy's", "second", id(layer), "first", id(layer), 1]
        assert layer.merge(1) == ["second", id(layer), "first", id(layer), 1]
    assert copied.merge(1) == layer.merge(1)
    in_place.replace(copied, "merge", functools.partial(first, copied))
    in_place.restore(copied, "merge", first)
    assert copied.merge(1) == layer.merge(1)


def test_a_pickle_has_the_method_of_the_class() -> None:
    text = pickle.dumps(both())
    assert b"gemma4_compat" not in text
    assert pickle.loads(text).merge(1) == [1]


def test_the_class_may_change_meanwhile() -> None:
    class Other:
        def merge(self, value: int) -> list[Any]:
            return ["other", value]

    layer: Any = Layer()
    with in_place.replaced(layer, "merge", named("a")):
        layer.__class__ = Other
        assert layer.merge(1) == ["a", "other", 1]


def test_what_was_taken_before_the_end_is_a_way_through() -> None:
    layer = Layer()
    with in_place.replaced(layer, "merge", named("a")):
        taken = layer.merge
    assert taken(1) == [1]


def test_an_object_that_had_replacements_goes_with_its_last_reference() -> None:
    """Memory of a GPU must not wait for the garbage collector."""
    layer = both()
    reference = weakref.ref(layer)
    with in_place.replaced(layer, "merge", named("a")), in_place.assigned(layer, "placement", 1):
        layer.merge(1)
    for function in (first, second):
        in_place.restore(layer, "merge", function)
    gc.disable()
    try:
        del layer
        assert reference() is None
    finally:
        gc.enable()


def test_whose_an_attribute_is() -> None:
    layer = Layer()
    with in_place.replaced(layer, "merge", named("a")):
        assert in_place.own(layer, "merge") is in_place.ABSENT
    vars(layer)["merge"] = named("own")
    with in_place.replaced(layer, "merge", named("a")):
        assert in_place.own(layer, "merge") is not in_place.ABSENT


# --------------------------------------------------------------------------------------------------------- attributes


@pytest.mark.parametrize("order", list(itertools.permutations("abc")))
@pytest.mark.parametrize("own", [in_place.ABSENT, "own"])
def test_an_attribute_is_put_back_in_any_order(order: tuple[str, ...], own: Any) -> None:
    layer: Any = Layer()
    before = {} if own is in_place.ABSENT else {"placement": own}
    vars(layer).update(before)
    values = {"a": "a", "b": in_place.ABSENT, "c": "c"}
    open_ = {}
    for name, value in values.items():
        stack = open_[name] = contextlib.ExitStack()
        stack.enter_context(in_place.assigned(layer, "placement", value))
    left = list(values)
    for name in order:
        open_[name].close()
        left.remove(name)
        top = values[left[-1]] if left else own
        assert vars(layer) == ({} if top is in_place.ABSENT else {"placement": top})
    assert vars(layer) == before
    assert not in_place._attributes


def test_what_somebody_else_assigns_meanwhile_stays() -> None:
    layer: Any = Layer()
    with in_place.assigned(layer, "placement", 1), in_place.assigned(layer, "placement", 2):
        layer.placement = "theirs"
    assert layer.placement == "theirs"
