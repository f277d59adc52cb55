"""A patch that cannot apply leaves no trace, says so once, and never breaks the user's import."""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from gemma4_compat import PatchState, PatchStatus
from gemma4_compat._engine.changes import ChangeSet
from gemma4_compat._engine.engine import Engine
from tests.helpers import CORE, Library, child, collected, installed, raw, tagged, traces

ID = "fakelib-double"
CHANGED = CORE.replace("x * times", "x * times + 0")


def failed(engine: Engine, library: Library) -> PatchStatus:
    """Import the library, which must work, and check that the patch failed, said so once, and left nothing."""
    core, said = collected(library.load)
    status = engine.status()[ID]
    assert status.state is PatchState.FAILED, status.reason
    assert [text.partition(" was not applied")[0] for text in said] == [f"patch '{ID}'"]
    assert status.reason in said[0]
    assert not [name for name in traces([library.name]) if name.startswith(library.name)]
    assert core.NUMBER == 3
    return status


def test_unknown_code_fails_with_one_warning_that_says_what_and_how_to_opt_out(
    create: Callable[..., Library],
) -> None:
    library = create(core=CHANGED)
    engine = installed(library.patch(library.target(source=CORE)))
    core, said = collected(library.load)
    assert len(said) == 1
    for part in (ID, f"{library.name}.core.double", f"{library.name} 1.0", "silent: double is wrong", "report it"):
        assert part in said[0]
    assert f"GEMMA4_COMPAT_DISABLE={ID}" in said[0]
    assert engine.status()[ID].state is PatchState.FAILED
    assert "is unknown (fingerprint" in engine.status()[ID].reason
    assert core.double(2) == 4
    again = collected(lambda: (engine.install(), engine.status(), engine.install()))[1]
    assert again == [], "it was said before"
    assert engine.status()[ID].state is PatchState.FAILED


def test_reverting_a_failed_patch_changes_nothing(create: Callable[..., Library]) -> None:
    library = create(core=CHANGED)
    engine = installed(library.patch(library.target(source=CORE)))
    status = failed(engine, library)
    assert engine.revert(ID)[ID] == status
    assert engine.revert()[ID] == status


def test_a_failed_patch_gets_another_chance_at_the_next_install(create: Callable[..., Library]) -> None:
    library = create(core=CHANGED)
    engine = installed(library.patch(library.target(source=CORE)))
    failed(engine, library)
    core = library.load()
    library.write("core", CORE)
    importlib.reload(core)
    engine.install()
    assert engine.status()[ID].state is PatchState.APPLIED
    assert core.double(2) == ("patched", 4)


def test_no_target_is_replaced_when_the_second_one_is_missing(library: Library) -> None:
    missing = library.target("quadruple", known={})
    status = failed(installed(library.patch(library.target(), missing)), library)
    assert status.reason == f"{library.name}.core.quadruple does not exist"
    assert library.load().double(2) == 4


def test_no_target_is_replaced_when_the_class_of_the_second_is_missing(library: Library) -> None:
    missing = library.target("Gone.forward", known={})
    failed(installed(library.patch(library.target(), missing)), library)


@pytest.mark.parametrize("broken", [1, 2, 3])
def test_nothing_stays_replaced_when_a_replacement_raises_on_the_way(
    library: Library, monkeypatch: pytest.MonkeyPatch, broken: int
) -> None:
    names = ["double", "triple", "Layer.forward"]
    replace = ChangeSet.replace

    def breaks(self: ChangeSet, module: str, name: str, replacement: Any, **options: Any) -> None:
        if name == names[broken - 1]:
            raise RuntimeError("on purpose")
        replace(self, module, name, replacement, **options)

    monkeypatch.setattr(ChangeSet, "replace", breaks)
    status = failed(installed(library.patch(*map(library.target, names))), library)
    assert status.reason == "RuntimeError: on purpose"


@pytest.mark.parametrize("name", ["NUMBER", "Special", "Layer", "partial", "cached"])
def test_what_is_not_a_function_is_not_replaced(create: Callable[..., Library], name: str) -> None:
    core = CORE + "import functools\npartial = functools.partial(triple, 1)\ncached = functools.lru_cache(triple)\n"
    library = create(core=core)
    known = library.target("triple").known
    failed(installed(library.patch(library.target(), library.target(name, known=known))), library)
    assert library.load().triple(1) == 3


def test_detect_that_raises_is_a_failure(library: Library) -> None:
    status = failed(installed(library.patch(detect=lambda: 1 / 0)), library)  # type: ignore[arg-type,return-value]
    assert status.reason == "ZeroDivisionError: division by zero"


def test_a_failed_patch_does_not_cost_the_others_their_turn(library: Library) -> None:
    engine = installed(
        library.patch(library.target(known={"000000000000": "0.9"})),
        library.patch(library.target("triple"), id="fakelib-triple"),
    )
    core, said = collected(library.load)
    assert len(said) == 1
    assert core.triple(2) == ("patched", 6)
    assert engine.status()["fakelib-triple"].state is PatchState.APPLIED


def test_an_empty_module_that_shadows_the_real_one_fails_cleanly(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (library.name, f"{library.name}.core"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    engine, said = collected(lambda: installed(library.patch()))
    assert len(said) == 1
    assert engine.status()[ID].state is PatchState.FAILED
    assert engine.status()[ID].reason == f"{library.name}.core.double does not exist"


def test_something_without_a_dict_in_place_of_the_package_does_not_break_arming(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = library.load()
    monkeypatch.setitem(sys.modules, library.name, object())
    engine, said = collected(lambda: installed(library.patch()))
    applied = engine.status()[ID].state is PatchState.APPLIED
    assert core.double(2) == (("patched", 4) if applied else 4)
    assert len(said) == (not applied)


def test_metadata_that_cannot_be_read_does_not_break_the_import(library: Library) -> None:
    (metadata,) = library.folder.glob(f"{library.name}-*.dist-info/METADATA")
    metadata.write_bytes(b"Metadata-Version: 2.1\nName: \xff\nVersion: 1.0\n")
    engine = installed(library.patch())
    core, said = collected(library.load)
    applied = engine.status()[ID].state is PatchState.APPLIED
    assert core.double(2) == (("patched", 4) if applied else 4)
    assert len(said) <= 1


def test_an_optional_target_that_is_missing_is_left_out(library: Library) -> None:
    gone = [
        library.target("gone", known={}, optional=True),
        library.target("Gone.forward", known={}, optional=True),
        library.target("gone", module="gone", known={}, optional=True),
    ]
    engine = installed(library.patch(library.target(), *gone))
    assert library.load().double(2) == ("patched", 4)
    assert engine.status()[ID].state is PatchState.APPLIED


def test_an_optional_target_whose_code_is_unknown_fails_the_patch(library: Library) -> None:
    unknown = library.target("triple", known={"000000000000": "0.9"}, optional=True)
    status = failed(installed(library.patch(library.target(), unknown)), library)
    assert f"{library.name}.core.triple is unknown" in status.reason


def test_an_optional_target_in_a_module_that_is_imported_later_is_repaired_too(
    create: Callable[..., Library],
) -> None:
    library = create(extra=CORE)
    installed(library.patch(library.target(), library.target("triple", module="extra", optional=True)))
    assert library.load().double(2) == ("patched", 4)
    assert library.load("extra").triple(2) == ("patched", 6)


def test_a_patch_that_fails_below_another_leaves_that_one_and_no_trace(library: Library) -> None:
    """Two patches on one function; the lower one is re-applied and fails on its second target."""
    lower = library.patch(library.target(), library.target("triple"), id="fakelib-lower")
    upper = library.patch(library.target(replacement=lambda original, *a, **k: ("upper", original(*a, **k))))
    core = library.load()
    original = core.double
    engine = installed(lower, upper)
    engine.revert("fakelib-lower")
    core.triple = functools.lru_cache(core.triple)  # known code, but not a function any more
    said = collected(engine.install)[1]
    assert len(said) == 1
    assert engine.status()["fakelib-lower"].state is PatchState.FAILED
    assert core.double(2) == ("upper", 4)
    assert raw(core, "double").__wrapped__ is original, "something of the failed patch is left below the other"
    engine.revert()
    assert raw(core, "double") is original


def test_a_source_that_is_gone_is_unknown_code(library: Library) -> None:
    library.load()
    (library.folder / library.name / "core.py").unlink()
    engine, said = collected(lambda: installed(library.patch()))
    status = engine.status()[ID]
    assert status.state is PatchState.FAILED
    assert "could not get source code" in status.reason
    assert len(said) == 1


def test_the_warning_is_shown_once_by_a_plain_python(create: Callable[..., Library]) -> None:
    library = create(core=CHANGED)
    script = f"""if True:
        import json
        from pathlib import Path
        from tests.helpers import Library, installed
        library = Library(Path({str(library.folder)!r}), {library.name!r})
        engine = installed(library.patch())
        core = library.load()
        engine.install()
        print(json.dumps([core.double(2), engine.status()["{ID}"].state]))
        """
    done = child("-c", script, path=[library.folder])
    assert done.data == [4, "failed"]
    assert done.stderr.count("Gemma4CompatWarning") == 1


def test_replacements_hand_on_what_they_were_given(library: Library) -> None:
    seen = []

    def replacement(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs))
        return tagged(original, *args, **kwargs)

    installed(library.patch(library.target(replacement=replacement)))
    core = library.load()
    assert core.double(2, times=5) == ("patched", 10)
    assert core.double(x=1) == ("patched", 2)
    assert seen == [((2,), {"times": 5}), ((), {"x": 1})]
    with pytest.raises(TypeError, match="unexpected keyword argument 'by'"):
        core.double(2, by=3)
    assert functools.reduce(lambda value, _: core.double(value)[1], range(3), 1) == 8
