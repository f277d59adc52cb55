"""Libraries that are installed without .py files, as PyInstaller and ``compileall -b`` leave them."""

from __future__ import annotations

import compileall
import importlib

import pytest

from gemma4_compat import Gemma4CompatError, PatchState
from gemma4_compat._engine.detection import NO_SOURCE
from tests.helpers import CORE, Library, collected, installed

IDS = ("fakelib-double", "fakelib-triple", "fakelib-copy")


def bare(library: Library) -> Library:
    """The library with .pyc files alone."""
    folder = library.folder / library.name
    assert compileall.compile_dir(folder, legacy=True, quiet=2)
    for file in folder.glob("*.py"):
        file.unlink()
    importlib.invalidate_caches()
    return library


@pytest.fixture
def library(library: Library) -> Library:
    library.write("copy", CORE)
    return bare(library)


def patches(library: Library) -> list[object]:
    names = {"fakelib-double": "double", "fakelib-triple": "triple"}
    found = [library.patch(library.target(name), id=patch_id) for patch_id, name in names.items()]
    return [*found, library.patch(library.target(module="copy"), id="fakelib-copy")]


def test_one_sentence_for_all_patches_says_what_to_do(library: Library) -> None:
    engine = installed(*patches(library))  # type: ignore[arg-type]
    (core, copy), said = collected(lambda: (library.load(), library.load("copy")))
    assert said == [NO_SOURCE]
    assert "report" not in NO_SOURCE
    assert "pyz+py" in NO_SOURCE
    assert core.double(2) == copy.double(2) == 4
    for patch_id, status in engine.status().items():
        assert (patch_id, status.state) in [(name, PatchState.FAILED) for name in IDS]
        assert status.reason.startswith(f"the source of {library.name}.")
        assert status.reason.endswith("is not there (could not get source code)")
    assert collected(lambda: (engine.install(), engine.status(), engine.revert()))[1] == []


def test_strict_each_patch_is_named(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMA4_COMPAT_STRICT", "1")
    installed(*patches(library))  # type: ignore[arg-type]
    with pytest.raises(Gemma4CompatError, match=r"the source of .*core\.double is not there"):
        library.load()


def test_a_group_with_sources_is_applied_and_the_other_is_said_so(
    library: Library,
) -> None:
    library.write("extra", CORE)
    patch = library.patch(library.target(group="one"), library.target(module="extra", group="two"))
    engine = installed(patch)
    extra, said = collected(lambda: (library.load(), library.load("extra"))[1])
    assert extra.double(2) == ("patched", 4)
    assert library.load().double(2) == 4
    assert engine.status()[IDS[0]].state is PatchState.APPLIED
    assert said == [NO_SOURCE]
