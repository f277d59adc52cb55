"""What settings and versions alone decide, before any code is looked at."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from gemma4_compat import Gemma4CompatError, Gemma4CompatWarning, PatchState, PatchStatus
from gemma4_compat._engine.patch import Detection, Target
from tests.helpers import CORE, Library, installed, raw

ID = "fakelib-double"
OTHER = "fakelib-triple"
CHANGED = CORE.replace("x * times", "x * times + 0")


def decided(library: Library, *targets: Target, **fields: Any) -> PatchStatus:
    """The status of one patch after the import. What was decided before must stand; only ``applied`` shows."""
    engine = installed(library.patch(*targets, **fields))
    before = engine.status()[ID]
    core = library.load()
    after = engine.status()[ID]
    assert before.state is PatchState.PENDING or (before.state, before.reason) == (after.state, after.reason)
    assert core.double(2) == (("patched", 4) if after.state is PatchState.APPLIED else 4)
    return after


def test_an_affected_release_is_repaired(library: Library) -> None:
    status = decided(library)
    assert status.state is PatchState.APPLIED
    assert status.reason == f"repairs {library.name} 1.0"
    assert status.versions == {library.name: "1.0"}
    assert status.at > 0
    assert not status.late


def test_an_absent_distribution_is_skipped(library: Library) -> None:
    status = decided(library, distribution="fakelib-that-nobody-has")
    assert (status.state, status.reason) == (PatchState.SKIPPED, "fakelib-that-nobody-has is not installed")


@pytest.mark.parametrize("affected", ["<1", ">1", ">=0.9,<1.0", "!=1.0"])
def test_outside_affected_nothing_is_replaced(library: Library, affected: str) -> None:
    status = decided(library, affected=affected, fixed="9.0")
    assert status.state is PatchState.NOT_NEEDED
    assert status.reason == f"{library.name} 1.0 is outside {affected} (fixed in 9.0)"


@pytest.mark.parametrize(
    "version, affected, inside",
    [
        ("5.6.0.dev0", ">=5.5", True),
        ("5.6.0rc1", ">=5.5,<5.6.0", False),  # PEP 440: <5.6.0 leaves its own pre-releases out
        ("5.5.0.dev0", ">=5.5", False),
        ("5.6.0.dev0", ">=5.5,<5.7", True),
        ("1.0+cpu", ">=1.0,<1.1", True),
        ("built-by-hand", ">=0", False),
    ],
)
def test_pre_releases_and_local_builds_count_like_any_release(
    create: Callable[..., Library], version: str, affected: str, inside: bool
) -> None:
    status = decided(create(version=version), affected=affected, measured="9")
    assert status.state is (PatchState.APPLIED if inside else PatchState.NOT_NEEDED)


def test_what_was_not_applied_is_not_late(library: Library) -> None:
    library.load()
    assert not decided(library, affected="<1").late


def test_an_absent_requirement_is_skipped(library: Library) -> None:
    status = decided(library, requires=("fakelib-that-nobody-has>=1",))
    assert (status.state, status.reason) == (PatchState.SKIPPED, "fakelib-that-nobody-has is not installed")


@pytest.mark.parametrize("specifier, met", [("<2", False), (">=2", True), ("", True), (">=2.1.dev0", True)])
def test_an_unmet_requirement_is_skipped(create: Callable[..., Library], specifier: str, met: bool) -> None:
    library, other = create(), create(version="2.1.dev0")
    status = decided(library, requires=(f"{other.name}{specifier}",))
    assert status.state is (PatchState.APPLIED if met else PatchState.SKIPPED)
    assert met or status.reason == f"only needed with {other.name}{specifier}; {other.name} is 2.1.dev0"
    assert status.versions == {library.name: "1.0", other.name: "2.1.dev0"}


def test_the_loaded_release_counts_not_the_installed_one(create: Callable[..., Library]) -> None:
    library = create(version="3.0", installed="1.0")
    library.load("__init__")
    assert decided(library, affected="<2").state is PatchState.NOT_NEEDED


@pytest.mark.parametrize("said", [Detection.NOT_AFFECTED, Detection.UNKNOWN])
def test_detect_has_a_veto(library: Library, said: Detection) -> None:
    engine = installed(library.patch(detect=lambda: said))
    with pytest.warns(Gemma4CompatWarning) if said is Detection.UNKNOWN else contextlib.nullcontext():
        core = library.load()
    status = engine.status()[ID]
    assert status.state is (PatchState.NOT_NEEDED if said is Detection.NOT_AFFECTED else PatchState.FAILED)
    assert status.reason == f"looked at the loaded {library.name} on this host: {said.replace('_', ' ')}"
    assert core.double(2) == 4


def test_detect_runs_on_complete_modules_only(library: Library) -> None:
    seen = []

    def detect() -> Detection:
        seen.append(library.load().NUMBER)
        return Detection.AFFECTED

    assert decided(library, detect=detect).state is PatchState.APPLIED
    assert seen == [3]


def test_disable_wins_over_enable(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMA4_COMPAT_ENABLE", ID)
    monkeypatch.setenv("GEMMA4_COMPAT_DISABLE", ID)
    status = decided(library)
    assert (status.state, status.reason) == (PatchState.SKIPPED, "disabled by GEMMA4_COMPAT_DISABLE")


@pytest.mark.parametrize(
    "value, off",
    [
        (ID, {ID}),
        (f" {ID} , ", {ID}),
        (f"\t{OTHER},,{ID}\n", {ID, OTHER}),
        ("all", {ID, OTHER}),
        (" ALL ", {ID, OTHER}),
        ("", set()),
        (" , ", set()),
    ],
)
def test_disable_takes_ids_and_all(
    library: Library, monkeypatch: pytest.MonkeyPatch, value: str, off: set[str]
) -> None:
    monkeypatch.setenv("GEMMA4_COMPAT_DISABLE", value)
    engine = installed(library.patch(), library.patch(library.target("triple"), id=OTHER))
    core = library.load()
    assert {name for name, status in engine.status().items() if status.state is PatchState.SKIPPED} == off
    assert core.double(2) == (4 if ID in off else ("patched", 4))
    assert core.triple(2) == (6 if OTHER in off else ("patched", 6))


@pytest.mark.parametrize("variable", ["DISABLE", "ENABLE"])
def test_an_unknown_id_warns_and_names_the_nearest(
    library: Library, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(f"GEMMA4_COMPAT_{variable}", f"fakelib-dubble,{ID}")
    expected = f"GEMMA4_COMPAT_{variable}: no patch has the id 'fakelib-dubble'; did you mean '{ID}'\\?"
    with pytest.warns(Gemma4CompatWarning, match=expected) as caught:
        status = decided(library)
    assert len(caught) == 1
    assert status.state is (PatchState.SKIPPED if variable == "DISABLE" else PatchState.APPLIED)


def test_enable_knows_no_all(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMA4_COMPAT_ENABLE", "all")
    with pytest.warns(Gemma4CompatWarning, match="no patch has the id 'all'"):
        assert decided(library).state is PatchState.APPLIED


def test_an_id_like_no_other_gets_the_list_of_all(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMA4_COMPAT_DISABLE", "zzz")
    with pytest.warns(Gemma4CompatWarning, match="`gemma4-compat list --verbose` shows every id"):
        assert decided(library).state is PatchState.APPLIED


@pytest.mark.parametrize("value, on", [("1", True), (" Yes", True), ("0", False), ("off", False), ("", False)])
def test_strict_turns_a_failure_into_an_error_of_the_import(
    library: Library, monkeypatch: pytest.MonkeyPatch, value: str, on: bool
) -> None:
    monkeypatch.setenv("GEMMA4_COMPAT_STRICT", value)
    engine = installed(library.patch(library.target(known={"000000000000": "0.9"})))
    pattern = rf"'{ID}'.*{library.name}\.core\.double is unknown"
    expected = pytest.raises(Gemma4CompatError, match=pattern) if on else pytest.warns(Gemma4CompatWarning)
    with expected:
        library.load()
    assert engine.status()[ID].state is PatchState.FAILED


def test_strict_raises_out_of_install_when_the_library_is_there_already(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMMA4_COMPAT_STRICT", "1")
    core = library.load()
    before = core.double
    with pytest.raises(Gemma4CompatError, match=ID):
        installed(library.patch(library.target(known={"000000000000": "0.9"})))
    assert raw(core, "double") is before


def test_a_strict_import_that_is_tried_again_fails_again(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else whoever swallows the first error, as optional imports do, goes on unpatched."""
    monkeypatch.setenv("GEMMA4_COMPAT_STRICT", "1")
    installed(library.patch(library.target(known={"000000000000": "0.9"})))
    for _ in range(3):
        with pytest.raises(Gemma4CompatError, match=ID):
            library.load()


def test_a_nonsense_value_of_strict_warns_and_is_off(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMA4_COMPAT_STRICT", "maybe")
    with pytest.warns(Gemma4CompatWarning, match="GEMMA4_COMPAT_STRICT='maybe' is neither on nor off") as caught:
        engine = installed(library.patch(library.target(known={"000000000000": "0.9"})))
    assert len(caught) == 1
    with pytest.warns(Gemma4CompatWarning, match="was not applied"):
        library.load()
    assert engine.status()[ID].state is PatchState.FAILED


def test_beyond_measured_unchanged_code_is_repaired_and_the_reason_says_so(create: Callable[..., Library]) -> None:
    library = create(version="2.0")
    status = decided(library, measured="1.0")
    assert status.state is PatchState.APPLIED
    expected = f"unmeasured release, code unchanged ({library.name} 2.0; measured up to 1.0)"
    assert status.reason == expected


@pytest.mark.parametrize("version", ["0.9", "1.0", "1.0.dev3"])
def test_up_to_measured_nothing_is_said_about_it(create: Callable[..., Library], version: str) -> None:
    assert "unmeasured" not in decided(create(version=version), affected=">=0.1", measured="1.0").reason


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_changed_code_is_never_replaced_whatever_the_version(create: Callable[..., Library], version: str) -> None:
    library = create(version=version, core=CHANGED)
    expected = "unmeasured release, code changed" if version == "2.0" else "the code of .* is unknown"
    with pytest.warns(Gemma4CompatWarning, match=expected):
        status = decided(library, library.target(source=CORE))
    assert status.state is PatchState.FAILED
