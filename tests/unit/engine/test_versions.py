"""Several copies of a library, a library that was upgraded meanwhile, and versions that are no versions."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from gemma4_compat import Gemma4CompatWarning, PatchState
from gemma4_compat._engine import versions
from tests.helpers import Library, installed, raw

ID = "fakelib-double"


def second_copy(library: Library, version: str, monkeypatch: pytest.MonkeyPatch) -> Library:
    copy = Library.create(library.folder / "second", library.name, version=version)
    monkeypatch.setattr(sys, "path", [*sys.path, str(copy.folder)])
    return copy


def test_two_copies_of_a_library_give_one_warning_that_names_both_folders(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = second_copy(library, "2.0", monkeypatch)
    engine = installed(library.patch(), library.patch(library.target("triple"), id="fakelib-triple"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.status()
        core = library.load()
        engine.install()
        engine.status()
    (warning,) = caught
    assert warning.category is Gemma4CompatWarning
    text = str(warning.message)
    assert text.startswith(f"several releases of {library.name} are on sys.path: ")
    first, second = f"1.0 in {library.folder.resolve()}", f"2.0 in {copy.folder.resolve()}"
    assert text.index(first) < text.index(second), "in the order in which Python searches"
    assert "remove the others" in text
    assert (core.double(2), core.triple(2)) == (("patched", 4), ("patched", 6))


def test_two_copies_of_one_release_and_a_folder_listed_twice_are_fine(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = second_copy(library, "1.0", monkeypatch)
    monkeypatch.setattr(sys, "path", [*sys.path, str(library.folder), str(copy.folder / "..")])
    engine = installed(library.patch())  # a warning of ours is an error here
    assert library.load().double(2) == ("patched", 4)
    assert engine.status()[ID].state is PatchState.APPLIED
    folders = {str(library.folder.resolve()): "1.0", str(copy.folder.resolve()): "1.0"}
    assert versions.copies(library.name) == folders


def test_a_library_upgraded_under_a_running_python_is_left_alone_until_it_restarts(library: Library) -> None:
    core = library.load()
    before = core.double
    library.write_metadata("1.1")
    with pytest.warns(Gemma4CompatWarning, match="restart Python"):
        engine = installed(library.patch())
    status = engine.status()[ID]
    assert status.state is PatchState.FAILED
    assert f"{library.name} 1.0 is loaded but 1.1 is installed now" in status.reason
    assert raw(core, "double") is before


def test_so_is_a_library_whose_requirement_was_upgraded(create: Callable[..., Library]) -> None:
    library, other = create(), create()
    other.load()
    other.write_metadata("1.1")
    engine = installed(library.patch(requires=(f"{other.name}>=1",)))
    with pytest.warns(Gemma4CompatWarning, match=f"{other.name} 1.0 is loaded but 1.1"):
        assert library.load().double(2) == 4
    assert engine.status()[ID].state is PatchState.FAILED


def test_metadata_is_read_once_for_all_patches_that_are_decided_together(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    installed_version = versions.installed
    monkeypatch.setattr(versions, "installed", lambda name: read.append(name) or installed_version(name))
    engine = installed(*(library.patch(library.target(name), id=f"fakelib-{name}") for name in ("double", "triple")))
    core = library.load()
    assert read == [library.name]
    engine.revert()
    library.write_metadata("1.1")
    with pytest.warns(Gemma4CompatWarning, match="1.0 is loaded but 1.1"):
        engine.install()
    assert (core.double(2), core.triple(2)) == (4, 6)


@pytest.mark.parametrize("says, metadata", [("1.0+cpu", "1.0"), ("1.0", "1.0+cu128"), ("1.0", "1.0.0")])
def test_spellings_of_one_release_do_not_differ(create: Callable[..., Library], says: str, metadata: str) -> None:
    library = create(version=says, installed=metadata)
    engine = installed(library.patch())
    assert library.load().double(2) == ("patched", 4)
    assert engine.status()[ID].state is PatchState.APPLIED


def test_a_package_that_does_not_say_its_version_counts_as_installed(library: Library) -> None:
    library.write("__init__", "")
    engine = installed(library.patch())
    assert library.load().double(2) == ("patched", 4)
    assert engine.status()[ID].versions == {library.name: "1.0"}


def test_a_package_without_metadata_counts_as_loaded(library: Library) -> None:
    (info,) = library.folder.glob(f"{library.name}-*.dist-info")
    (info / "METADATA").unlink()
    info.rmdir()
    engine = installed(library.patch())
    assert engine.status()[ID].reason == f"{library.name} is not installed"
    assert library.load().double(2) == ("patched", 4)
    assert engine.status()[ID].state is PatchState.APPLIED


def test_installed_loaded_and_current(create: Callable[..., Library]) -> None:
    library = create(version="1.0", installed="2.0")
    name = library.name
    assert (versions.installed(name), versions.loaded(name), versions.current(name)) == ("2.0", None, "2.0")
    library.load()
    assert (versions.installed(name), versions.loaded(name), versions.current(name)) == ("2.0", "1.0", "1.0")
    assert versions.installed("fakelib-that-nobody-has") is None
    assert versions.copies("fakelib-that-nobody-has") == {}


def test_a_dash_in_the_name_of_a_distribution_is_an_underscore_in_its_package(create: Callable[..., Library]) -> None:
    library = create(name="fake_dashed", version="3.0")
    library.load()
    assert versions.loaded("fake-dashed") == "3.0"
    assert Path(next(iter(versions.copies("fake-dashed")))) == library.folder.resolve()


@pytest.mark.parametrize(
    "first, second, different",
    [
        ("1.0", "1.0", False),
        ("1.0", "1.0.0", False),
        ("1.0", "1.1", True),
        ("1.0", "1.0.dev1", True),
        ("1.0+a", "1.0+b", False),
        ("1.0", "hand-made", False),
    ],
)
def test_differ(first: str, second: str, different: bool) -> None:
    assert versions.differ(first, second) is versions.differ(second, first) is different


@pytest.mark.parametrize(
    "version, than, later",
    [
        ("1.10", "1.9", True),
        ("1.0", "1.0", False),
        ("1.0.dev1", "1.0", False),
        ("1.0.post1", "1.0", True),
        ("1.0+cu130", "1.0", False),
    ],
)
def test_newer(version: str, than: str, later: bool) -> None:
    assert versions.newer(version, than=than) is later


@pytest.mark.parametrize(
    "text, parsed",
    [("peft", ("peft", "")), ("bitsandbytes<0.50.0", ("bitsandbytes", "<0.50.0")), ("a >=1, <2", ("a", ">=1, <2"))],
)
def test_requirement(text: str, parsed: tuple[str, str]) -> None:
    assert versions.requirement(text) == parsed
