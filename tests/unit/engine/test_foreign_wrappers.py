"""The fingerprint is of what is called: on top of upstream's own wrappers, of torch.compile's and of ours, or not."""

from __future__ import annotations

import contextlib
import functools
import linecache
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import wrapt

from gemma4_compat import PatchState, Reason
from tests.helpers import CORE, Library, child, collected, foreign, installed, raw

ID = "fakelib-double"
WRAPPING = """
import contextlib
import functools


def logged(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


@logged
@logged
def double(x):
    return x * 2


@contextlib.contextmanager
def opened(x):
    yield x


class Layer:
    @logged
    def forward(self, x):
        return x + 1


def registered(cls):
    cls.forward = logged(cls.forward)
    return cls


@registered
class Registered(Layer):
    def forward(self, x):
        return x + 2
"""
FOREIGN = {
    "functools.wraps": foreign,
    "functools.lru_cache": functools.lru_cache,
    "wrapt": lambda function: wrapt.FunctionWrapper(function, lambda wrapped, _instance, args, kwargs: wrapped(*args)),
    "a context manager": lambda function: contextlib.contextmanager(function),
}


@pytest.mark.parametrize("what", FOREIGN)
@pytest.mark.parametrize("name, arguments", [("double", (2,)), ("Layer.forward", (None, 3))])
def test_on_top_of_somebody_elses_wrapper_nothing_is_put(
    library: Library, what: str, name: str, arguments: tuple[Any, ...]
) -> None:
    core = library.load()
    owner, attribute = (core.Layer, "forward") if "." in name else (core, name)
    wrapper = FOREIGN[what](getattr(owner, attribute))
    setattr(owner, attribute, wrapper)
    engine, said = collected(lambda: installed(library.patch(library.target(name))))
    status = engine.status()[ID]
    assert status.state is PatchState.FAILED
    assert f" wraps {core.__name__}.{name}, and this was not proven on top of it; import " in status.reason
    assert [status.reason in text for text in said] == [True]
    assert raw(owner, attribute) is wrapper
    if what == "functools.wraps":
        assert status.reason.startswith("tests.helpers.wrapper wraps ")
        assert wrapper(*arguments) == ("foreign", 4)


def test_a_wrapper_put_on_afterwards_wraps_what_is_repaired_which_is_what_the_reason_advises(library: Library) -> None:
    engine = installed(library.patch())
    core = library.load()
    core.double = foreign(core.double)
    assert core.double(2) == ("foreign", ("patched", 4))
    assert engine.status()[ID].state is PatchState.APPLIED


def test_when_the_wrapper_is_gone_the_next_install_repairs(library: Library) -> None:
    core = library.load()
    original = core.double
    core.double = foreign(original)
    engine, said = collected(lambda: installed(library.patch()))
    core.double = original
    engine.install()
    assert core.double(2) == ("patched", 4)
    assert engine.status()[ID].state is PatchState.APPLIED
    assert len(said) == 1


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["double", "opened", "Layer.forward", "Registered.forward"])
def test_upstreams_own_decorators_are_no_strangers(create: Callable[..., Library], name: str, late: bool) -> None:
    library = create(core=WRAPPING)
    if late:
        library.load()
    engine = installed(library.patch(library.target(name)))
    library.load()
    assert engine.status()[ID].state is PatchState.APPLIED, engine.status()[ID].reason


def test_one_more_of_a_decorator_that_upstream_uses_is_a_stranger(create: Callable[..., Library]) -> None:
    library = create(core=WRAPPING)
    core = library.load()
    core.opened = contextlib.contextmanager(core.opened)
    engine, said = collected(lambda: installed(library.patch(library.target("opened"))))
    assert engine.status()[ID].reason.startswith("contextlib.helper wraps ")
    assert len(said) == 1


def test_what_torch_compiles_is_the_code_that_it_was_given(library: Library) -> None:
    core = library.load()
    template = foreign(core.double)
    compiled = types.FunctionType(
        template.__code__, {"__name__": "torch._dynamo.eval_frame"}, closure=template.__closure__
    )
    core.double = functools.update_wrapper(compiled, core.double)
    engine = installed(library.patch())
    assert engine.status()[ID].state is PatchState.APPLIED
    assert core.double(2) == ("patched", ("foreign", 4))


def test_our_other_patches_below_are_no_strangers(library: Library) -> None:
    core = library.load()
    first = installed(library.patch())
    second = installed(library.patch(id="fakelib-other"))
    assert core.double(2) == ("patched", ("patched", 4))
    assert {engine.status()[name].state for engine, name in [(first, ID), (second, "fakelib-other")]} == {
        PatchState.APPLIED
    }


def test_in_a_plain_python_there_is_one_warning_and_the_wrapper_works_on(create: Callable[..., Library]) -> None:
    library = create(core=CORE)
    script = f"""if True:
        import functools, json
        from pathlib import Path
        from tests.helpers import Library, installed
        library = Library(Path({str(library.folder)!r}), {library.name!r})
        core = library.load()
        def timed(function):
            @functools.wraps(function)
            def timing(*args, **kwargs):
                return ("timed", function(*args, **kwargs))
            return timing
        core.double = timed(core.double)
        engine = installed(library.patch())
        engine.install()
        print(json.dumps([core.double(2), engine.status()["{ID}"].reason]))
        """
    done = child("-c", script, path=[library.folder])
    assert done.data[0] == ["timed", 4]
    assert done.data[1].startswith("__main__.timing wraps ")
    assert done.stderr.count("Gemma4CompatWarning") == 1


REPLACING = """
def doubled(x, times=2):
    return ("other", x)
"""


@pytest.fixture
def replaced(create: Callable[..., Library], monkeypatch: pytest.MonkeyPatch) -> Library:
    """Its ``double`` and ``Layer.forward`` are another library's."""
    library = create()
    core = library.load()
    other = types.ModuleType("otherlib_core")
    monkeypatch.setitem(sys.modules, "otherlib_core", other)
    monkeypatch.setitem(sys.modules, "otherlib", types.ModuleType("otherlib"))
    exec(REPLACING, vars(other))  # a module of another library
    core.double = core.Layer.forward = other.doubled
    linecache.cache["<otherlib>"] = (len(REPLACING), None, REPLACING.splitlines(keepends=True), "<otherlib>")
    other.doubled.__code__ = other.doubled.__code__.replace(co_filename="<otherlib>")
    return library


def test_what_another_library_has_replaced_is_said_in_one_line_for_all_patches(replaced: Library) -> None:
    library, core = replaced, replaced.load()
    patches = [library.patch(), library.patch(library.target("Layer.forward"), id="fakelib-other")]
    engine, said = collected(lambda: installed(*patches))
    for status in engine.status().values():
        assert (status.state, status.reason_code) == (PatchState.FAILED, Reason.REPLACED)
        assert status.reason.startswith(f"otherlib_core.doubled is in the place of {core.__name__}.")
    (line,) = said
    assert "repairs of functions that otherlib has patched are off" in line
    assert "Leave out what otherlib does there, or use one of the two" in line  # it was imported after this package
    assert core.double(2) == ("other", 2)


@pytest.mark.parametrize("group", ["", "a"])
def test_the_line_begins_with_what_is_in_the_place_also_if_a_patch_acts_in_part(replaced: Library, group: str) -> None:
    target, known = replaced.target(group=group), replaced.target("triple", group="b")
    engine, said = collected(lambda: installed(replaced.patch(target, known)))
    assert engine.state(ID).reason_code is Reason.IN_PART
    (line,) = said
    assert line.startswith("otherlib_core.doubled is in the place of ")
