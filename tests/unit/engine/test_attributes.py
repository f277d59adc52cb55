"""What instances read under a name, replaced: their own value, else that of their class, which may have none."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from gemma4_compat import Patch, PatchState
from gemma4_compat._engine.fingerprint import fingerprint_source
from tests.helpers import Library, installed, raw, traces

CLASSES = """
class Base:
    flag = False

class Child(Base):
    pass

class Bare:
    pass
"""
NAMES = {"Base.flag": "False", "Bare.flag": "absent"}


@pytest.fixture
def library(create: Callable[..., Library]) -> Library:
    return create(flags=CLASSES)


def patch_of(library: Library, id: str = "fakelib-flag", word: str = "read") -> Patch:
    def replacement(original: Callable[..., Any], self: Any) -> Any:
        return (word, original(self))

    targets = [
        library.target(name, replacement, module="flags", known={fingerprint_source(text): "1.0"})
        for name, text in NAMES.items()
    ]
    return library.patch(*(dataclasses.replace(target, attribute=True) for target in targets), id=id)


@pytest.mark.parametrize("late", [False, True])
def test_what_was_set_before_while_and_after_is_there(library: Library, late: bool) -> None:
    if late:
        library.load("flags")
    engine = installed(patch_of(library))
    flags = library.load("flags")
    assert engine.status()["fakelib-flag"].state is PatchState.APPLIED
    made = flags.Child(), flags.Bare()
    assert made[0].flag == ("read", False)
    for one in made:
        one.flag = True
        assert one.flag == ("read", True)
        assert vars(one) == {"flag": True}
    copies = [*copy.deepcopy(made), *pickle.loads(pickle.dumps(made))]
    assert [one.flag for one in copies] == [("read", True)] * 4
    assert not engine.status(count=True)["fakelib-flag"].unreached
    engine.revert()
    assert raw(flags.Base, "flag") is False
    assert "flag" not in vars(flags.Bare)
    assert [one.flag for one in (*made, *copies)] == [True] * 6
    assert not traces([library.name])
    engine.install()
    assert [one.flag for one in (*made, *copies)] == [("read", True)] * 6
    engine.revert()


def test_an_instance_from_before_is_reached(library: Library) -> None:
    flags = library.load("flags")
    old = flags.Child()
    old.flag = 3
    engine = installed(patch_of(library))
    assert old.flag == ("read", 3)
    engine.revert()
    assert old.flag == 3


def test_what_is_absent_stays_absent(library: Library) -> None:
    engine = installed(patch_of(library))
    flags = library.load("flags")
    assert not hasattr(flags.Bare(), "flag")
    assert not hasattr(flags.Bare, "flag")
    assert getattr(flags.Bare(), "flag", None) is None
    one = flags.Bare()
    with pytest.raises(AttributeError, match="flag"):
        del one.flag
    one.flag = 1
    del one.flag
    assert not hasattr(one, "flag")
    engine.revert()


def test_a_class_and_a_subclass_with_a_value_of_its_own_read_theirs(library: Library) -> None:
    engine = installed(patch_of(library))
    flags = library.load("flags")
    own: Any = type("Own", (flags.Base,), {"flag": 7})
    assert (flags.Base.flag, flags.Child.flag, own.flag, own().flag) == (False, False, 7, 7)
    engine.revert()


def test_two_patches_read_through_each_other(library: Library) -> None:
    """Each looks for upstream's value below the other."""
    lower, upper = patch_of(library, word="lower"), patch_of(library, id="fakelib-upper", word="upper")
    engine = installed(lower, upper)
    flags = library.load("flags")
    assert {one.state for one in engine.status().values()} == {PatchState.APPLIED}
    assert flags.Child().flag == ("upper", ("lower", False))
    assert flags.Base.flag is False
    engine.revert("fakelib-flag")
    assert flags.Child().flag == ("upper", False)
    engine.revert()
    assert raw(flags.Base, "flag") is False


def test_another_value_is_other_code(create: Callable[..., Library]) -> None:
    library = create(flags=CLASSES.replace("False", "True"))
    engine = installed(patch_of(library))
    with pytest.warns(match="unknown"):
        flags = library.load("flags")
    status = engine.status()["fakelib-flag"]
    assert status.state is PatchState.FAILED, status
    assert flags.Base.flag is True
