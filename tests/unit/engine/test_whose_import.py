"""Whose import fails, and by what: none by a warning, with STRICT its own alone, and none by asking for the status."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

import pytest

from gemma4_compat import Gemma4CompatError, Gemma4CompatWarning, PatchState
from gemma4_compat._engine import changes
from gemma4_compat._engine.engine import Engine
from gemma4_compat._engine.io import notice
from gemma4_compat._engine.patch import LatePatch
from tests import helpers
from tests.helpers import CORE, Library, child, collected, installed

ID = "fakelib-double"
OTHER = "fakelib-triple"
Create = Callable[..., Library]


def unknown(library: Library, **fields: Any) -> Any:
    """A patch that fails: the code of its target is not what it was proven on."""
    return library.patch(library.target(known={"0" * 12: "0.9"}), **fields)


def broken(library: Library) -> LatePatch:
    """A patch whose file cannot be imported."""

    def load() -> Any:
        raise ImportError("no such name")

    return LatePatch(id=OTHER, modules=(f"{library.name}.core",), load=load)


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMA4_COMPAT_STRICT", "1")


# -------------------------------------------------------------------------------------------------- warnings as errors


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was shown in place of being raised."""
    found: list[str] = []
    monkeypatch.setattr(notice, "show", lambda warning, file, line: found.append(f"{file}:{line}: {warning}"))
    return found


def test_a_failed_patch_breaks_no_import_where_warnings_are_errors(library: Library, shown: list[str]) -> None:
    engine = installed(unknown(library), library.patch(library.target("triple"), id=OTHER))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            core = library.load()
            assert (core.double(2), core.triple(2)) == (4, ("patched", 6))
        engine.install()
    assert len(shown) == 1, "once"
    assert f"patch {ID!r} was not applied" in shown[0]
    assert shown[0].startswith(f"{helpers.__file__}:"), "where library.load() is"
    assert engine.status()[ID].state is PatchState.FAILED


@pytest.mark.parametrize("value", ["DISABLE=fakelib-duoble", "STRICT=maybe"])
def test_a_setting_without_sense_breaks_no_import_either(
    library: Library, shown: list[str], monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    name, _, text = value.partition("=")
    monkeypatch.setenv(f"GEMMA4_COMPAT_{name}", text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        installed(library.patch())
    assert len(shown) == 1
    assert library.load().double(2) == ("patched", 4)


def test_a_plain_python_that_is_told_so_shows_it_on_stderr(create: Create) -> None:
    library = create(core=CORE.replace("x * times", "x * times + 0"))
    script = f"""if True:
        from pathlib import Path
        from tests.helpers import Library, installed
        library = Library(Path({str(library.folder)!r}), {library.name!r})
        installed(library.patch())
        import {library.name}.core as core
        import {library.name}.core as again
        print([core.double(2), again.double(3)])
        """
    done = child("-W", "error", "-c", script, path=[library.folder])
    assert done.data == [4, 6]
    assert done.stderr.startswith(f"<string>:6: Gemma4CompatWarning: patch {ID!r} was not applied"), done.stderr


def test_the_package_itself_is_imported_where_warnings_are_errors() -> None:
    done = child(
        "-W", "error", "-c", "import gemma4_compat; print([1])", environment={"GEMMA4_COMPAT_DISABLE": "no-such"}
    )
    assert done.data == [1]
    assert "<string>:1: Gemma4CompatWarning: GEMMA4_COMPAT_DISABLE: no patch has the id 'no-such'" in done.stderr


def test_a_warning_names_the_line_outside_of_the_library(create: Create) -> None:
    library = create(api="import importlib\ncore = importlib.import_module('LIBRARY.core')\n")
    installed(unknown(library))
    with pytest.warns(Gemma4CompatWarning, match="was not applied") as caught:
        importlib.import_module(f"{library.name}.api")
    assert [item.filename for item in caught] == [__file__]


def test_a_filter_that_shows_nothing_is_obeyed(library: Library, shown: list[str]) -> None:
    installed(unknown(library))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        library.load()
    assert (caught, shown) == ([], [])


# -------------------------------------------------------------------------------------------------------------- strict


def arms(library: Library, *patches: Any) -> list[Engine]:
    """Make the library's core, while it is imported, arm an engine each time; they will be in the list."""
    library.write("core", CORE + "import LIBRARY\nLIBRARY.arm()\n")
    engines: list[Engine] = []
    package = importlib.import_module(library.name)
    vars(package)["arm"] = lambda: engines or engines.append(installed(*patches))
    return engines


@pytest.mark.usefixtures("strict")
def test_the_error_of_a_half_imported_module_belongs_to_its_own_import(library: Library) -> None:
    library.write("unrelated", "")
    engines = arms(library, unknown(library))
    for _ in range(3):
        with pytest.raises(Gemma4CompatError, match=ID):
            library.load()
        assert f"{library.name}.core" not in sys.modules, "else the next import would find it"
    library.load("unrelated")
    assert engines[0].status()[ID].state is PatchState.FAILED


@pytest.mark.usefixtures("strict")
def test_the_error_of_a_module_that_imports_the_half_imported_one(library: Library) -> None:
    """Its import fails because that of the other does; nothing is left of either, and it fails again."""
    library.write("outer", "import LIBRARY.core\n")
    arms(library, unknown(library))
    for _ in range(2):
        with pytest.raises(Gemma4CompatError, match=ID):
            library.load("outer")
        assert not {f"{library.name}.core", f"{library.name}.outer"} & sys.modules.keys()


@pytest.mark.usefixtures("strict")
def test_an_import_that_fails_by_itself_keeps_its_own_error(library: Library) -> None:
    engines = arms(library, unknown(library))
    library.write("core", CORE + "import LIBRARY\nLIBRARY.arm()\nraise ImportError('not today')\n")
    with pytest.raises(ImportError, match="not today"):
        library.load()
    library.write("core", CORE)
    with pytest.raises(Gemma4CompatError, match=ID):
        library.load()
    assert len(engines) == 1


@pytest.mark.usefixtures("strict")
def test_every_patch_is_decided_before_the_import_fails(library: Library) -> None:
    late = LatePatch(id=OTHER, modules=(f"{library.name}.core",), load=lambda: library.patch(id=OTHER))
    engine = Engine([unknown(library), unknown(library, id="fakelib-second"), late])
    engine.install()
    with pytest.raises(Gemma4CompatError, match=f"(?s){ID}.*fakelib-second"):
        library.load()
    states = [status.state for status in engine.status().values()]
    assert PatchState.PENDING not in states


@pytest.mark.usefixtures("strict")
def test_a_broken_file_makes_the_second_import_fail_too(library: Library) -> None:
    Engine([broken(library)]).install()
    for _ in range(3):
        with pytest.raises(Gemma4CompatError, match="its file cannot be imported"):
            library.load()


@pytest.mark.usefixtures("strict")
def test_a_failed_import_is_not_taken_for_one_that_was_made(library: Library) -> None:
    """A patch of two modules, of which one failed to be imported, is not looked for in what is not there."""
    library.write("other", CORE)
    both = library.patch(library.target(), library.target("triple", module="other"), id=OTHER)
    engine = installed(unknown(library), both)
    with pytest.raises(Gemma4CompatError, match=ID):
        library.load()
    library.load("other")
    assert engine.status()[OTHER].reason == f"waiting for the import of {library.name}.core"


@pytest.mark.usefixtures("strict")
def test_a_reload_into_unknown_code_fails_itself(library: Library) -> None:
    installed(library.patch())
    core = library.load()
    library.write("core", CORE.replace("x * times", "x * times + 0"))
    with pytest.raises(Gemma4CompatError, match=ID):
        importlib.reload(core)


# -------------------------------------------------------------------------------------------------------------- status


def everything(engine: Engine) -> Any:
    """All that could have been changed by asking: what the engine decided, and what is in the libraries."""
    decided = {record.id: (record.status, record.changes, record.warned) for record in engine._records.values()}
    return decided, list(changes._installed), set(sys.modules)


@pytest.mark.parametrize("value", ["", "1"])
def test_asking_changes_nothing_warns_of_nothing_and_raises_nothing(
    create: Create, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("GEMMA4_COMPAT_STRICT", value)
    library = create(extra="")
    gone = library.patch(library.target(module="gone", known={}), id="fakelib-gone")
    engine = Engine([library.patch(), gone, broken(library)])
    engine.install()
    library.load("extra")
    before = everything(engine)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = engine.status(), engine.status()
    assert first == second
    assert everything(engine) == before
    assert [str(status.state) for status in first.values()] == ["pending", "failed", "failed"]
    assert first["fakelib-gone"].reason == f"module {library.name}.gone does not exist in {library.name} 1.0"
    assert first[OTHER].reason == "its file cannot be imported: ImportError: no such name"


def test_asking_does_not_apply_what_can_be_applied(library: Library) -> None:
    """A module that was put into sys.modules by hand: nobody was told."""
    engine = installed(library.patch())
    spec = ModuleSpec(f"{library.name}.core", None)
    core = importlib.util.module_from_spec(spec)
    source = library.folder / library.name / "core.py"
    exec(compile(CORE, source, "exec"), vars(core))
    importlib.import_module(library.name)
    sys.modules[spec.name] = core
    before = core.double
    status = engine.status()[ID]
    assert (status.state, core.double) == (PatchState.PENDING, before)
    assert "install() applies it now" in status.reason
    engine.install()
    assert engine.status()[ID].state is PatchState.APPLIED
    assert core.double(2) == ("patched", 4)


def test_listing_and_reverting_a_broken_file_says_nothing(library: Library) -> None:
    engine = Engine([broken(library), library.patch()])
    engine.install()
    _, said = collected(lambda: (engine.patches(), engine.revert(), engine.status()))
    assert said == []
    assert {str(status.state) for status in engine.status().values()} == {"reverted"}
