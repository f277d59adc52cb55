"""What a replaced function looks like to ``inspect``, and what it adds to a traceback."""

from __future__ import annotations

import gc
import inspect
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from gemma4_compat._engine import changes
from tests.helpers import Library, foreign, installed

ID = "fakelib-double"
CORE = '''
def double(x, y=(1, 2), /, *names: int, times=2, more: "str" = "m", **rest) -> "int":
    """Twice x."""
    return 1 / x


def fail(error):
    raise error


class Layer:
    def forward(self, x, scale=1.0, *, mode="fast"):
        return 1 / x

    @staticmethod
    def scale(x, by=10):
        return 1 / x

    @classmethod
    def make(cls, x, size=3, *, exact=True):
        return 1 / x
'''
NAMES = ["double", "Layer.forward", "Layer.scale", "Layer.make"]
ARGUMENTS: dict[str, tuple[Any, ...]] = {"Layer.forward": (None, 0)}


@pytest.fixture
def core(create: Callable[..., Library]) -> Library:
    return create(core=CORE)


def held(library: Library, name: str) -> Any:
    found = library.load()
    for part in name.split("."):
        found = getattr(found, part)
    return found


def passing(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs)


# As code of the package would be, whose frames are left out.
package = dict(vars(changes), __name__="gemma4_compat.patches.fake")
exec(compile(inspect.getsource(passing), "fake.py", "exec"), package)


@pytest.mark.parametrize("name", NAMES)
def test_defaults_are_upstreams(core: Library, name: str) -> None:
    def look() -> tuple[Any, ...]:
        function = getattr(held(core, name), "__func__", held(core, name))
        names = ("__defaults__", "__kwdefaults__", "__annotations__", "__doc__", "__module__", "__name__")
        # accelerate copies what a forward has to one that is bound, so a forward has no signature to read.
        read = (inspect.signature, *(() if name == "Layer.forward" else (inspect.getfullargspec,)))
        return (*(reader(function) for reader in read), *(getattr(function, name) for name in names))

    before = look()
    called = []

    def counting(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        called.append((args, kwargs))
        return 0

    installed(core.patch(core.target(name, counting)))
    assert look() == before
    assert any(before[-6:-4]), "it has defaults"
    function = held(core, name)
    function(*ARGUMENTS.get(name, (7,)))
    (given,) = called
    assert (given[0][-1], given[1]) == (ARGUMENTS.get(name, (7,))[-1], {}), "nothing is filled in"


@pytest.mark.parametrize("patches", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_traceback_of_an_upstream_error_has_one_frame_of_ours(core: Library, name: str, patches: int) -> None:
    replacements = [core.patch(core.target(name, package["passing"]), id=f"fakelib-{i}") for i in range(patches)]
    engine = installed(*replacements)
    function = held(core, name)
    with pytest.raises(ZeroDivisionError) as caught:
        function(*ARGUMENTS.get(name, (0,)))
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert [file.rpartition("/")[2] for file in files] == ["test_looks.py", "changes.py", "core.py"]
    assert caught.value.__context__ is None
    engine.revert()
    with pytest.raises(ZeroDivisionError) as caught:
        held(core, name)(*ARGUMENTS.get(name, (0,)))
    assert "core.py" in str(traceback.extract_tb(caught.value.__traceback__)[-1].filename)


def test_the_same_error_arrives_with_its_cause_and_its_notes(core: Library) -> None:
    installed(core.patch(core.target("fail", package["passing"])))
    error = KeyError("why")
    error.__cause__ = cause = ValueError("because")
    error.__suppress_context__ = True
    for raised in (error, KeyboardInterrupt(), StopIteration(3), GeneratorExit()):
        with pytest.raises(type(raised)) as caught:
            held(core, "fail")(raised)
        assert caught.value is raised
        assert caught.value.__context__ is None
    assert error.__cause__ is cause
    assert error.__suppress_context__


def test_an_error_of_the_replacement_itself_keeps_all_its_frames(core: Library) -> None:
    def breaks(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return {}[args]

    installed(core.patch(core.target("double", breaks)))
    with pytest.raises(KeyError) as caught:
        held(core, "double")(0)
    assert [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)][1:] == ["installed", "breaks"]


def test_what_others_put_between_the_patch_and_upstream_stays_visible(core: Library) -> None:
    def through(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return foreign(original)(*args, **kwargs)

    installed(core.patch(core.target("double", through)))
    with pytest.raises(ZeroDivisionError) as caught:
        held(core, "double")(0)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[1:] == ["installed", "through", "wrapper", "double"]


def test_an_error_that_was_handled_leaves_nothing_alive(core: Library) -> None:
    class Big:
        pass

    installed(core.patch(core.target("double", package["passing"])))
    alive = []

    def handles() -> str:
        big = Big()
        alive.append(weakref.ref(big))
        try:
            held(core, "double")(big)
        except TypeError as error:
            return str(error)
        return "nothing was raised"

    gc.disable()
    try:
        assert "unsupported operand" in handles()
        assert alive[0]() is None, "a cycle of frames would keep it, and on a small card its tensors"
    finally:
        gc.enable()
