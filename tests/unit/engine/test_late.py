"""Patches whose files are imported late, patches with two groups of targets, and patches that need others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from gemma4_compat import Gemma4CompatError, Gemma4CompatWarning, Patch, PatchState
from gemma4_compat._engine.engine import Engine
from gemma4_compat._engine.patch import LatePatch
from tests.helpers import Library, collected, installed

ID = "fakelib-double"


class File:
    """A patch file, and how often it was imported."""

    def __init__(self, patch: Patch, error: Exception | None = None) -> None:
        self.patch, self.error, self.loads = patch, error, 0

    def load(self) -> Patch:
        self.loads += 1
        if self.error is not None:
            raise self.error
        return self.patch

    @property
    def late(self) -> LatePatch:
        modules = tuple(dict.fromkeys(target.module for target in self.patch.targets))
        return LatePatch(id=self.patch.id, modules=modules, load=self.load)


def armed(*files: File) -> Engine:
    engine = Engine([file.late for file in files])
    engine.install()
    return engine


def test_a_file_is_imported_when_a_module_of_the_patch_is(library: Library) -> None:
    file = File(library.patch())
    library.write("other", "")
    engine = armed(file)
    library.load("other")
    assert file.loads == 0
    assert library.load().double(2) == ("patched", 4)
    assert file.loads == 1
    assert engine.status()[ID].state is PatchState.APPLIED
    assert file.loads == 1


def test_a_library_that_was_imported_before_is_patched_at_once(library: Library) -> None:
    core = library.load()
    file = File(library.patch())
    armed(file)
    assert core.double(2) == ("patched", 4)


def test_a_narrow_engine_imports_no_other_file(library: Library) -> None:
    wanted, other = File(library.patch()), File(library.patch(library.target("triple"), id="fakelib-triple"))
    engine = armed(wanted, other)
    engine.narrow([ID])
    core = library.load()
    assert (core.double(2), core.triple(2)) == (("patched", 4), 6)
    assert (wanted.loads, other.loads) == (1, 0)


@pytest.mark.parametrize("ask", [lambda engine: engine.status(), lambda engine: engine.patches()])
def test_who_asks_gets_every_patch(library: Library, ask: Callable[[Engine], object]) -> None:
    file = File(library.patch())
    engine = armed(file)
    ask(engine)
    assert file.loads == 1
    assert engine.patches() == (file.patch,)
    assert engine.status()[ID].reason == f"waiting for the import of {library.name}"


def test_a_file_that_cannot_be_imported_is_one_failed_patch(library: Library) -> None:
    broken = File(library.patch(id="fakelib-broken"), SyntaxError("invalid syntax"))
    file = File(library.patch(library.target("triple"), id="fakelib-triple"))
    engine = armed(broken, file)
    core, said = collected(library.load)
    assert core.triple(2) == ("patched", 6)
    assert core.double(2) == 4
    status = engine.status()
    assert status["fakelib-broken"].state is PatchState.FAILED
    assert status["fakelib-broken"].reason == "its file cannot be imported: SyntaxError: invalid syntax"
    assert len(said) == 1
    assert "patch 'fakelib-broken' was not applied, nothing was changed: its file cannot be imported" in said[0]
    assert engine.patches() == (file.patch,)
    assert engine.revert()["fakelib-broken"].state is PatchState.FAILED


def test_a_broken_file_is_tried_again_by_install(library: Library) -> None:
    file = File(library.patch(), ImportError("no"))
    engine = armed(file)
    collected(library.load)
    file.error = None
    engine.install()
    assert engine.status()[ID].state is PatchState.APPLIED


def test_a_disabled_patch_whose_file_is_broken_is_skipped(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMA4_COMPAT_DISABLE", ID)
    engine = armed(File(library.patch(), ImportError("no")))
    _, said = collected(library.load)
    assert said == []
    assert engine.status()[ID].reason == "disabled by GEMMA4_COMPAT_DISABLE"


def test_strict_a_broken_file_makes_the_import_fail(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMA4_COMPAT_STRICT", "1")
    armed(File(library.patch(), ImportError("no")))
    with pytest.raises(Gemma4CompatError, match="its file cannot be imported: ImportError: no"):
        library.load()


# -------------------------------------------------------------------------------------------------------------- groups


@pytest.fixture
def twins(library: Library) -> Library:
    library.write("copy", library.core)
    return library


def both(library: Library, **known: dict[str, str]) -> Patch:
    return library.patch(
        library.target(group="one", **({"known": known["one"]} if "one" in known else {})),
        library.target(module="copy", group="two", **({"known": known["two"]} if "two" in known else {})),
    )


def test_one_group_does_not_wait_for_the_other(twins: Library) -> None:
    engine = installed(both(twins))
    assert twins.load("copy").double(2) == ("patched", 4)
    assert engine.status()[ID].state is PatchState.APPLIED
    assert twins.load().double(2) == ("patched", 4)
    engine.revert()
    assert (twins.load().double(2), twins.load("copy").double(2)) == (4, 4)
    engine.install()
    assert (twins.load().double(2), twins.load("copy").double(2)) == (("patched", 4), ("patched", 4))


def test_a_group_of_unknown_code_leaves_the_other_applied_and_says_so(twins: Library) -> None:
    engine = installed(both(twins, two={"0" * 12: "1.0"}))
    twins.load()
    copy, said = collected(lambda: twins.load("copy"))
    assert (twins.load().double(2), copy.double(2)) == (("patched", 4), 4)
    status = engine.status()[ID]
    assert status.state is PatchState.APPLIED
    assert "; not in two: the code of " in status.reason
    assert len(said) == 1
    assert f"patch {ID!r} was applied in part: repairs" in said[0]


def test_strict_a_group_of_unknown_code_fails_its_own_import_each_time(
    twins: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMMA4_COMPAT_STRICT", "1")
    engine = installed(both(twins, two={"0" * 12: "1.0"}))
    assert twins.load().double(2) == ("patched", 4)
    for _ in range(2):
        with pytest.raises(Gemma4CompatError, match="was applied in part"):
            twins.load("copy")
        assert twins.load().double(2) == ("patched", 4), "once"
    with contextlib.suppress(Gemma4CompatError):
        engine._on_import(f"{twins.name}.core", own=True)  # as when it is imported again: not applied on top of itself
    assert twins.load().double(2) == ("patched", 4)
    assert engine.revert()[ID].state is PatchState.REVERTED
    assert twins.load().double(2) == 4


def test_where_no_group_is_known_nothing_is_changed(twins: Library) -> None:
    engine = installed(both(twins, one={"0" * 12: "1.0"}, two={"0" * 12: "1.0"}))
    with pytest.warns(Gemma4CompatWarning, match="was not applied, nothing was changed"):
        twins.load()
    assert collected(lambda: twins.load("copy"))[1] == []  # said once
    assert engine.status()[ID].state is PatchState.FAILED
    assert (twins.load().double(2), twins.load("copy").double(2)) == (4, 4)


def test_a_group_that_comes_after_one_of_unknown_code_is_applied(twins: Library) -> None:
    engine = installed(both(twins, one={"0" * 12: "1.0"}))
    assert "was not applied" in collected(twins.load)[1][0]
    assert twins.load("copy").double(2) == ("patched", 4)
    assert engine.status()[ID].state is PatchState.APPLIED


def test_a_release_without_the_module_of_a_group_waits_for_the_others(library: Library) -> None:
    engine = installed(both(library))
    assert engine.status()[ID].state is PatchState.PENDING
    assert library.load().double(2) == ("patched", 4)
    assert engine.status()[ID].state is PatchState.APPLIED


# --------------------------------------------------------------------------------------------------------------- needs


def test_a_patch_says_which_one_it_misses(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMA4_COMPAT_DISABLE", "fakelib-triple")
    engine = installed(
        library.patch(needs=("fakelib-triple",)), library.patch(library.target("triple"), id="fakelib-triple")
    )
    library.load()
    status = engine.status()[ID]
    assert status.unmet == ("fakelib-triple",)
    assert status.reason.endswith("; not exact without fakelib-triple (skipped)")
    monkeypatch.delenv("GEMMA4_COMPAT_DISABLE")
    engine.install()
    assert engine.status()[ID].unmet == ()
    engine.revert("fakelib-triple")
    assert engine.status()[ID].reason.endswith("; not exact without fakelib-triple (reverted)")


@pytest.mark.parametrize("fields", [{"affected": ">=2"}, {"requires": ("no-such-distribution",)}])
def test_one_that_this_stack_does_not_need_is_not_missed(library: Library, fields: dict[str, object]) -> None:
    other = library.patch(library.target("triple"), id="fakelib-triple", **fields)
    engine = installed(library.patch(needs=("fakelib-triple",)), other)
    library.load()
    assert engine.status()[ID].unmet == ()
