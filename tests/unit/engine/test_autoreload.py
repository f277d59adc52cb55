"""Jupyter's ``%autoreload``: patches stay, and edits arrive, wherever functions and classes went.

IPython's own reloader, without a kernel around it. With ``dedupe`` it first tries to put the code of the functions
that changed into those that are there (``%autoreload 2``), else it reloads the module (``%autoreload 2-``).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("IPython", reason="needs IPython: pip install 'gemma4-compat[test]'")

from IPython.extensions.autoreload import ModuleReloader

from gemma4_compat import PatchState
from gemma4_compat._engine import autoreload
from tests.helpers import CORE, Library, collected, installed

ID = "fakelib-double"
PATCHED = dict.fromkeys(["module", "name", "other", "class", "old class", "instance", "subclass"], True)


class Notebook:
    """A session that has imported what a patch replaces, in every way, and then edits it."""

    def __init__(self, library: Library, dedupe: bool) -> None:
        library.write("other", "from LIBRARY.core import double, triple, Layer\nclass Mine(Layer):\n    pass\n")
        self.library = library
        self.engine = installed(library.patch(library.target(), library.target("Layer.forward")))
        self.core, self.other = library.load(), library.load("other")
        self.double, self.instance, self.sub = self.core.double, self.core.Layer(), self.other.Mine()
        self.reloader = ModuleReloader()
        self.reloader.enabled = True
        if hasattr(self.reloader, "deduper_reloader"):  # since IPython 8.32
            self.reloader.deduper_reloader.enabled = dedupe
        self.reloader.mark_module_reloadable(f"{library.name}.core")
        self._times = itertools.count(int(Path(self.core.__file__).stat().st_mtime) + 10, 10)
        self.edit(CORE + "\n")  # from here on it knows the source, wherever the module lies

    def edit(self, text: str) -> list[str]:
        """Save the module, run the next cell. Returns what we said."""
        self.library.write("core", text)
        time = next(self._times)
        os.utime(self.core.__file__, (time, time))
        said = collected(self.reloader.check)[1]
        assert self.reloader.failed == {}, "the reload failed"
        return said

    def double_by(self) -> dict[str, Any]:
        return {"module": self.core.double(2), "name": self.double(2), "other": self.other.double(2)}

    def patched(self) -> dict[str, bool]:
        layers = {
            "class": self.core.Layer(),
            "old class": self.other.Layer(),
            "instance": self.instance,
            "subclass": self.sub,
        }
        forwards = {name: layer.forward(1) == ("patched", 2) for name, layer in layers.items()}
        return {name: value == ("patched", 4) for name, value in self.double_by().items()} | forwards


@pytest.fixture(params=[True, False], ids=["in place", "whole"])
def notebook(library: Library, request: pytest.FixtureRequest) -> Notebook:
    return Notebook(library, request.param)


def test_edits_of_other_functions_arrive_and_patches_stay(notebook: Notebook) -> None:
    for factor in (33, 333):
        assert notebook.edit(CORE.replace("x * 3", f"x * {factor}")) == []
        assert notebook.core.triple(1) == notebook.other.triple(1) == factor
        assert notebook.patched() == PATCHED
    assert notebook.engine.status()[ID].overridden == ()


@pytest.mark.parametrize("text", ["Twice x.", "return x + 1"])
def test_edits_that_change_no_code_of_a_patched_function_leave_it_patched(notebook: Notebook, text: str) -> None:
    changed = {"Twice x.": "Two x.", "return x + 1": '"""One more."""\n        return x + 1'}[text]
    for source in (CORE.replace(text, changed), CORE):
        assert notebook.edit(source) == []
        assert notebook.patched() == PATCHED
    assert notebook.engine.status()[ID].state is PatchState.APPLIED


def test_an_edit_of_a_patched_function_arrives_everywhere_and_is_one_warning(notebook: Notebook) -> None:
    said = notebook.edit(CORE.replace("x * times", "x * times * 10"))
    assert len(said) == 1
    assert "was not applied" in said[0]
    assert set(notebook.double_by().values()) == {40}
    assert notebook.edit(CORE.replace("x * times", "x * times * 20")) == []
    assert set(notebook.double_by().values()) == {80}
    assert notebook.engine.status()[ID].state is PatchState.FAILED


def test_with_the_code_back_install_repairs_functions_again(library: Library) -> None:
    notebook = Notebook(library, dedupe=False)
    for text in ("x * times * 10", "x * times * 20", "x * times"):
        notebook.edit(CORE.replace("x * times", text))
    notebook.engine.install()
    notebook.double = notebook.core.double
    assert notebook.patched() == PATCHED | {"old class": False, "subclass": False}
    notebook.engine.revert()
    assert set(notebook.double_by().values()) == {4}


def test_reverted_patches_let_edits_through(notebook: Notebook) -> None:
    notebook.engine.revert()
    assert notebook.edit(CORE.replace("x * times", "x * times * 10")) == []
    assert set(notebook.double_by().values()) == {40}


def test_it_is_taught_once(library: Library) -> None:
    from IPython.extensions import autoreload as ipython

    for _ in range(2):
        autoreload.arm()
        installed(library.patch())
    assert [applies for applies, _ in ipython.UPDATE_RULES].count(autoreload._applies) == 1


@pytest.mark.parametrize("teach", autoreload._LESSONS.values())
def test_another_ipython_is_left_alone(teach: Callable[[Any], None]) -> None:
    """One without what is changed here, as a later release may be."""
    import types

    module = types.ModuleType("IPython.extensions.autoreload")
    before = set(vars(module))
    teach(module)
    assert set(vars(module)) == before
