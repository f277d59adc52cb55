"""A reloaded module is patched again, what was made of it before stays patched, and all of it can be undone."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

from gemma4_compat import PatchState
from gemma4_compat._engine.engine import Engine
from tests.helpers import Library, collected, installed

ID = "fakelib-double"
FORWARD = "Layer.forward"


def both(library: Library) -> Any:
    return library.patch(library.target(), library.target(FORWARD))


@pytest.mark.parametrize("late", [False, True])
def test_a_reloaded_module_is_patched_again(library: Library, late: bool) -> None:
    if late:
        library.load()
    engine = installed(both(library))
    core = library.load()
    for _ in range(3):
        core, said = collected(lambda: importlib.reload(library.load()))
        assert said == []
        assert core.double(2) == ("patched", 4)
        assert core.Layer().forward(1) == ("patched", 2)
        assert core.Special().forward(1) == ("patched", 2)
        status = engine.status()[ID]
        assert status.state is PatchState.APPLIED
        assert status.overridden == ()
    assert type(core.__spec__.loader).__module__ == type(core.__loader__).__module__ == "_frozen_importlib_external"


def test_what_was_there_before_stays_patched(library: Library) -> None:
    library.write("other", "from LIBRARY.core import double, Layer\n")
    installed(both(library))
    other = library.load("other")
    layer = other.Layer()
    importlib.reload(library.load())
    assert layer.forward(1) == ("patched", 2)
    assert other.double(2) == ("patched", 4)
    assert importlib.reload(other).double(2) == ("patched", 4)


def test_revert_restores_the_functions_of_the_reloaded_module(library: Library) -> None:
    library.write("other", "from LIBRARY.core import double\n")
    engine = installed(both(library))
    other, old = library.load("other"), library.load().Layer
    core = importlib.reload(library.load())
    reverted = engine.revert()[ID]
    assert reverted.state is PatchState.REVERTED
    assert "another library" not in reverted.reason
    for function in (core.double, other.double, core.Layer.forward, old.forward):
        assert not hasattr(function, "__wrapped__")
    assert core.double.__globals__ is vars(core)
    importlib.reload(core)
    assert core.double(2) == 4
    engine.install()
    assert core.double(2) == ("patched", 4)


def test_a_module_that_took_a_function_is_reloaded_after_its_source(library: Library) -> None:
    library.write("other", "from LIBRARY.core import double\n")
    other = library.load("other")
    engine = installed(both(library), library.patch(id="fakelib-again"))
    assert other.double(2) == ("patched", ("patched", 4))
    importlib.reload(library.load())
    importlib.reload(other)
    assert engine.status()[ID].overridden == ()
    assert not [status for status in engine.revert().values() if "another library" in status.reason]
    assert other.double is library.load().double
    assert other.double(2) == 4


def test_a_disabled_patch_stays_off(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMA4_COMPAT_DISABLE", ID)
    installed(both(library))
    assert importlib.reload(library.load()).double(2) == 4


def test_patches_of_one_function_keep_their_order(library: Library) -> None:
    def outer(original: Any, *args: Any) -> Any:
        return "outer", original(*args)

    engine = installed(library.patch(), library.patch(library.target("double", outer), id="fakelib-outer"))
    core = importlib.reload(library.load())
    assert core.double(2) == ("outer", ("patched", 4))
    engine.revert(ID)
    assert core.double(2) == ("outer", 4)
    engine.revert()
    assert core.double(2) == 4


def test_reloaded_into_other_code_it_is_one_warning(library: Library) -> None:
    engine = installed(both(library))
    core = library.load()
    library.write("core", library.core.replace("x * times", "x * times + 0 * times"))
    _, said = collected(lambda: importlib.reload(core))
    assert len(said) == 1
    assert "is unknown" in said[0]
    assert core.double(2) == 4
    assert engine.status()[ID].state is PatchState.FAILED


def test_a_reload_while_the_module_is_half_imported(library: Library) -> None:
    again = "import importlib, sys\nif not hasattr(sys.modules[__name__], 'once'):\n"
    again += "    once = True\n    importlib.reload(sys.modules[__name__])\n"
    library.write("core", again + library.core)
    engine = installed(both(library))
    core = library.load()
    assert engine.status()[ID].overridden == ()
    assert core.double(2) == ("patched", 4)
    assert core.Layer().forward(1) == ("patched", 2)


def test_executed_again_without_a_reload_install_applies_it(library: Library) -> None:
    engine = installed(both(library))
    core = library.load()
    exec(compile(library.core, core.__file__, "exec"), vars(core))
    assert core.double(2) == 4
    assert engine.status()[ID].overridden
    engine.install()
    assert core.double(2) == ("patched", 4)
    assert core.Layer().forward(1) == ("patched", 2)
    assert engine.status()[ID].overridden == ()


def test_install_leaves_what_another_library_put_there(library: Library) -> None:
    engine = installed(both(library))
    core = library.load()
    core.double = theirs = lambda x, *, times=2: "theirs"
    engine.install()
    assert core.double is theirs


def test_autoreload_updates_old_functions_with_new_ones(library: Library) -> None:
    """As IPython's does it: the code of new functions goes into old ones, and instances get new classes."""
    installed(both(library))
    core = library.load()
    old_class, old_function, layer = core.Layer, core.double, core.Layer()
    importlib.reload(core)
    for old, new in ((old_function, core.double), (old_class.forward, core.Layer.forward)):
        for name in ("__code__", "__defaults__", "__doc__", "__dict__"):
            setattr(old, name, getattr(new, name))
    layer.__class__ = core.Layer
    assert old_function(2) == ("patched", 4)
    assert old_class().forward(1) == ("patched", 2)
    assert layer.forward(1) == ("patched", 2)


def test_a_module_without_targets_is_reloaded_as_ever(library: Library) -> None:
    library.write("other", "import LIBRARY.core\n")
    engine = installed(both(library))
    assert importlib.reload(library.load("other")) is sys.modules[f"{library.name}.other"]
    assert isinstance(engine, Engine)
