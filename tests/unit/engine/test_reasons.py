"""Every state has a code for its reason; none is read out of a sentence."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest

from gemma4_compat import Gemma4CompatError, Gemma4CompatWarning, Kind, PatchState, PatchStatus, Reason
from gemma4_compat._engine.engine import Engine
from gemma4_compat._engine.patch import Detection, LatePatch, Patch
from tests.helpers import CORE, Library, installed

ID = "fakelib-double"
CHANGED = CORE.replace("x * times", "x * times + 0")


def seen(engine: Engine) -> tuple[PatchState, Reason]:
    status = engine.state(ID)
    assert engine.status()[ID] == status
    assert status.reason
    return status.state, status.reason_code


def decided(library: Library, *targets: Any, **fields: Any) -> tuple[PatchState, Reason]:
    engine = installed(library.patch(*targets, **fields))
    library.load()
    return seen(engine)


def test_before_an_import(library: Library) -> None:
    engine = Engine([library.patch()])
    assert seen(engine) == (PatchState.REGISTERED, Reason.NOT_ARMED)
    engine.install()
    assert seen(engine) == (PatchState.PENDING, Reason.WAITING)
    library.load()
    assert seen(engine) == (PatchState.APPLIED, Reason.AFFECTED)
    engine.revert()
    assert seen(engine) == (PatchState.REVERTED, Reason.REVERTED)


def test_of_releases(create: Callable[..., Library]) -> None:
    library, other = create(), create(version="3.0")
    skipped = PatchState.SKIPPED
    assert decided(library, distribution="fakelib-that-nobody-has") == (skipped, Reason.NOT_INSTALLED)
    assert decided(library, requires=(f"{other.name}<2",)) == (skipped, Reason.ONLY_WITH)
    assert decided(library, affected="<1") == (PatchState.NOT_NEEDED, Reason.OUT_OF_RANGE)
    assert decided(create(version="2.0"), measured="1.0") == (PatchState.APPLIED, Reason.UNMEASURED)


def test_of_a_release_that_is_too_old(library: Library) -> None:
    engine = Engine([library.patch()], oldest={library.name: "2.0"})
    engine.install()
    assert seen(engine) == (PatchState.SKIPPED, Reason.TOO_OLD)
    with pytest.warns(Gemma4CompatWarning, match="is older than the oldest supported release 2.0"):
        library.load()
    assert seen(engine) == (PatchState.SKIPPED, Reason.TOO_OLD)


@pytest.mark.parametrize(
    "said, expected",
    [
        (Detection.NOT_AFFECTED, (PatchState.NOT_NEEDED, Reason.NO_DEFECT)),
        (Detection.UNKNOWN, (PatchState.FAILED, Reason.UNRECOGNIZED)),
    ],
)
@pytest.mark.filterwarnings("ignore::gemma4_compat.Gemma4CompatWarning")
def test_of_a_look_at_the_code(library: Library, said: Detection, expected: tuple[PatchState, Reason]) -> None:
    assert decided(library, detect=lambda: said) == expected


@pytest.mark.filterwarnings("ignore::gemma4_compat.Gemma4CompatWarning")
def test_of_code_that_is_not_the_known_code(create: Callable[..., Library], monkeypatch: pytest.MonkeyPatch) -> None:
    failed = PatchState.FAILED
    for version in ("1.0", "2.0"):  # the second is not measured
        library = create(version=version, core=CHANGED)
        assert decided(library, library.target(source=CORE)) == (failed, Reason.CODE_DIFFERS)
    library = create()
    assert decided(library, library.target("gone", known={"0" * 12: "1.0"})) == (failed, Reason.MODULE_ABSENT)
    wrapped = create()
    core = wrapped.load()

    @functools.wraps(core.double)
    def foreign(*args: Any) -> Any:
        return foreign.__wrapped__(*args)  # type: ignore[attr-defined]

    monkeypatch.setattr(core, "double", foreign)
    assert decided(wrapped) == (failed, Reason.WRAPPED)


@pytest.mark.filterwarnings("ignore::gemma4_compat.Gemma4CompatWarning")
def test_of_an_exception(library: Library, create: Callable[..., Library]) -> None:
    def broken() -> Detection:
        raise ZeroDivisionError

    assert decided(library, detect=broken) == (PatchState.FAILED, Reason.ERROR)
    upgraded = create(version="1.0", installed="2.0")
    upgraded.load("__init__")
    assert decided(upgraded) == (PatchState.FAILED, Reason.UPGRADED)


@pytest.mark.filterwarnings("ignore::gemma4_compat.Gemma4CompatWarning")
@pytest.mark.parametrize("group, expected", [("b", "; not in b: the code "), ("", "; in part: the code ")])
def test_of_groups_of_which_one_is_unknown(library: Library, group: str, expected: str) -> None:
    known, unknown = library.target(group="a"), library.target("triple", known={"0" * 12: "1.0"}, group=group)
    engine = installed(library.patch(known, unknown))
    library.load()
    status = engine.state(ID)
    assert (status.state, status.reason_code) == (PatchState.APPLIED, Reason.IN_PART)
    assert expected in status.reason


@pytest.mark.filterwarnings("ignore::gemma4_compat.Gemma4CompatWarning")
def test_of_a_group_that_is_unknown_beside_one_of_other_releases(library: Library) -> None:
    unknown = library.target("triple", known={"0" * 12: "1.0"}, group="a")
    other = dataclasses.replace(library.target(group="b"), affected=">=99")
    engine = installed(library.patch(unknown, other))
    library.load()
    assert seen(engine) == (PatchState.FAILED, Reason.CODE_DIFFERS)


@pytest.mark.filterwarnings("ignore::gemma4_compat.Gemma4CompatWarning")
def test_of_a_file_that_cannot_be_imported(library: Library) -> None:
    def load() -> Patch:
        raise ImportError("no such thing")

    engine = Engine([LatePatch(id=ID, modules=(f"{library.name}.core",), load=load)])
    engine.install()
    library.load()
    assert seen(engine) == (PatchState.FAILED, Reason.BROKEN_FILE)


def test_of_a_patch_that_needs_one_that_is_off(library: Library) -> None:
    other = library.patch(library.target("triple"), id="fakelib-triple")
    engine = installed(library.patch(needs=("fakelib-triple",)), other)
    library.load()
    assert engine.state(ID).reason_code is Reason.AFFECTED
    engine.revert("fakelib-triple")
    status = engine.state(ID)
    assert (status.state, status.reason_code, status.unmet) == (PatchState.APPLIED, Reason.NEEDS, ("fakelib-triple",))


@pytest.mark.parametrize("value", ["speed", " SPEED ,notice", f"speed,{ID}"])
def test_a_kind_is_switched_off_with_all_its_patches(
    library: Library, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("GEMMA4_COMPAT_DISABLE", value)
    faster = library.patch(library.target("triple"), id="fakelib-triple", kind=Kind.SPEED)
    engine = installed(library.patch(), faster)
    core = library.load()
    assert core.triple(2) == 6
    status = engine.state("fakelib-triple")
    assert (status.state, status.reason_code) == (PatchState.SKIPPED, Reason.DISABLED)
    assert status.reason == "disabled by GEMMA4_COMPAT_DISABLE, with all others of the kind speed"
    named = ID in value
    assert core.double(2) == (4 if named else ("patched", 4))
    assert engine.state(ID).reason == ("disabled by GEMMA4_COMPAT_DISABLE" if named else f"repairs {library.name} 1.0")


def test_a_misspelt_kind_is_one_warning_that_names_it(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMA4_COMPAT_DISABLE", "spead")
    expected = (
        r"no patch has the id 'spead'; did you mean 'speed'\? Write ids, kinds \(repair, refusal, speed, notice\)"
    )
    with pytest.warns(Gemma4CompatWarning, match=expected):
        assert decided(library) == (PatchState.APPLIED, Reason.AFFECTED)


def test_no_kind_can_be_enabled(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMA4_COMPAT_ENABLE", "speed")
    with pytest.warns(Gemma4CompatWarning, match="no patch has the id 'speed'"):
        decided(library)


def test_the_state_of_one_patch_imports_the_file_of_that_one(library: Library) -> None:
    loaded: list[str] = []

    def late(patch: Patch) -> LatePatch:
        def load() -> Patch:
            loaded.append(patch.id)
            return patch

        return LatePatch(id=patch.id, modules=(f"{library.name}.core",), load=load)

    engine = Engine([late(library.patch()), late(library.patch(library.target("triple"), id="fakelib-triple"))])
    engine.install()
    assert engine.state(ID) == PatchStatus(
        id=ID,
        state=PatchState.PENDING,
        reason_code=Reason.WAITING,
        reason=f"waiting for the import of {library.name}",
        versions={library.name: "1.0"},
        at=engine.state(ID).at,
    )
    assert loaded == [ID]
    assert engine.status()[ID] == engine.state(ID)
    assert loaded == [ID, "fakelib-triple"]
    with pytest.raises(Gemma4CompatError, match=f"no patch has the id 'fakelib-dubble'; did you mean '{ID}'"):
        engine.state("fakelib-dubble")


def test_nothing_is_counted_unless_somebody_asks(library: Library) -> None:
    core = library.load()
    kept = [core.double]
    engine = installed(library.patch())
    assert engine.status()[ID].unreached is None
    assert engine.revert(ID)[ID].unreached is None
    engine.install()
    assert engine.state(ID, count=True).unreached == len(kept)


def test_sources_that_are_not_installed(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    from gemma4_compat._engine import detection

    def absent(_function: Any) -> str:
        raise OSError("could not get source code")

    monkeypatch.setattr(detection, "fingerprint", absent)
    with pytest.warns(Gemma4CompatWarning, match="installed without its .py files"):
        assert decided(library) == (PatchState.FAILED, Reason.NO_SOURCE)
