"""Releases older than the oldest supported one, and releases that come after the newest measured one."""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from gemma4_compat import Gemma4CompatError, Patch, PatchState, PatchStatus, _shim
from gemma4_compat._engine import versions
from gemma4_compat._engine.engine import Engine
from gemma4_compat._engine.patch import Detection, Target
from tests.helpers import CORE, ROOT, Library, collected, installed, is_ours, raw, tagged, traces

ID = "fakelib-double"
OTHER = "fakelib-triple"
Create = Callable[..., Library]


# ---------------------------------------------------------------------------------------- the oldest supported release


def armed(oldest: Mapping[str, str], *patches: Patch) -> Engine:
    engine = Engine(patches, oldest)
    engine.install()
    return engine


def too_old(library: Library, version: str, oldest: str) -> str:
    return (
        f"{library.name} {version} is older than the oldest supported release {oldest}; "
        f"upgrade: pip install '{library.name}>={oldest}'"
    )


@pytest.mark.parametrize("version", ["0.17.1", "0.18.0.dev0", "0.18.0rc1", "0.17.1+cu128"])
def test_below_the_oldest_release_patches_are_skipped_with_one_warning_a_library(create: Create, version: str) -> None:
    library = create(version=version)
    patches = [library.patch(affected=">=0.1"), library.patch(library.target("triple"), id=OTHER, affected=">=0.1")]
    engine = armed({library.name: "0.18.0"}, *patches)
    before, said = collected(engine.status)
    assert said == [], "it is not even imported"
    core, said = collected(library.load)
    assert len(said) == 1
    assert said[0].startswith(too_old(library, version, "0.18.0"))
    assert "GEMMA4_COMPAT_DISABLE=all silences this" in said[0]
    for statuses in (before, engine.status()):
        assert {item.state for item in statuses.values()} == {PatchState.SKIPPED}
        assert {item.reason for item in statuses.values()} == {too_old(library, version, "0.18.0")}
    assert (core.double(2), core.triple(2)) == (4, 6)
    assert collected(lambda: (engine.install(), engine.status(), library.load("__init__")))[1] == []


@pytest.mark.parametrize("version", ["0.18.0", "0.18", "0.18.0+cu128", "0.18.0.post1", "0.18.1.dev0", "1.0"])
def test_the_oldest_release_and_later_ones_are_supported(create: Create, version: str) -> None:
    library = create(version=version)
    engine = armed({library.name: "0.18.0"}, library.patch(affected=">=0.1"))
    assert library.load().double(2) == ("patched", 4)  # a warning of ours is an error here
    assert engine.status()[ID].state is PatchState.APPLIED


def test_a_version_that_is_none_is_judged_as_before(create: Create) -> None:
    library = create(version="built-by-hand")
    engine = armed({library.name: "0.18.0"}, library.patch(affected=">=0.1"))
    assert library.load().double(2) == 4
    assert engine.status()[ID].reason == f"{library.name} built-by-hand is outside >=0.1"


def test_a_required_library_counts_too_and_is_warned_about_when_it_is_loaded(create: Create) -> None:
    library, other = create(), create(version="0.9")
    of_other = other.patch(other.target(), id=OTHER, affected=">=0.1")
    engine = armed({other.name: "1.0"}, library.patch(requires=(other.name,)), of_other)
    core, said = collected(library.load)
    assert said == [], f"{other.name} is installed and not used"
    assert engine.status()[ID].state is PatchState.SKIPPED
    assert engine.status()[ID].reason == too_old(other, "0.9", "1.0")
    _, said = collected(other.load)
    assert len(said) == 1
    assert core.double(2) == 4


@pytest.mark.parametrize("value", ["all", ID])
def test_disabling_silences_it(library: Library, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("GEMMA4_COMPAT_DISABLE", value)
    engine = armed({library.name: "2.0"}, library.patch())
    library.load()  # a warning of ours is an error here
    assert engine.status()[ID].reason == "disabled by GEMMA4_COMPAT_DISABLE"


def test_strict_refuses_an_old_release_each_time_it_is_imported(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMMA4_COMPAT_STRICT", "1")
    engine = armed({library.name: "2.0"}, library.patch())
    for _ in range(3):
        with pytest.raises(Gemma4CompatError, match=r"older than the oldest supported release 2\.0; upgrade: pip"):
            library.load()
    assert engine.status()[ID].state is PatchState.SKIPPED


def test_strict_refuses_an_old_release_that_is_there_already(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMMA4_COMPAT_STRICT", "1")
    library.load()
    with pytest.raises(Gemma4CompatError, match="older than the oldest"):
        armed({library.name: "2.0"}, library.patch())


def test_the_package_is_armed_with_the_oldest_supported_releases() -> None:
    assert _shim.engine._gate.oldest is versions.OLDEST


def test_what_pip_is_asked_for_is_what_the_engine_asks_for() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    stack = re.search(r"^stack = \[(.*?)\]", text, re.M | re.S)
    assert stack
    asked = dict(re.findall(r'"([a-z]+)>=([0-9.]+)"', stack[1]))
    for name, oldest in versions.OLDEST.items():
        assert not versions.differ(asked[name], oldest), name


# ----------------------------------------------------------------------- releases later than any it was measured on


FUTURE = "2.0"


def future(
    create: Create, core: str, *targets: Callable[[Library], Target], version: str = FUTURE, said: int = 0
) -> PatchStatus:
    """The status of a patch proven on CORE of 1.0, where ``version`` has ``core``. Only ``applied`` shows."""
    library = create(core=core, version=version)
    made = [target(library) for target in targets] or [library.target(source=CORE)]
    engine = installed(library.patch(*made))
    module, warnings = collected(library.load)
    status = engine.status()[ID]
    assert len(warnings) == said, warnings
    assert all(status.reason in text and f"gemma4-compat doctor {ID}" in text for text in warnings)
    again = collected(lambda: (engine.install(), engine.status(), engine.install()))[1]
    assert again == [], "it was said before"
    if status.state is PatchState.APPLIED:
        assert module.double(2) == ("patched", 4)
    else:
        assert not [name for name in traces([library.name]) if name.startswith(library.name)]
        assert "double" not in vars(module) or not is_ours(raw(module, "double"))
    return status


HARMLESS = {
    "nothing": CORE,
    "comment": CORE.replace("    return x * times", "    # twice, as documented\n    return x * times"),
    "docstring": CORE.replace('"""Twice x."""', '"""Two times x.\n\n    By default.\n    """'),
    "no docstring": CORE.replace('    """Twice x."""\n', ""),
    "annotations": CORE.replace("(x, *, times=2)", '(x: "int", *, times: int = 2) -> "int"'),
    "layout": CORE.replace("def double(x, *, times=2):", "def double(\n    x,\n    *,\n    times=2,\n):"),
    "parentheses": CORE.replace("return x * times", "return (\n        x\n        * times\n    )"),
    "its place": CORE.replace("\ndef double", "\ndef before_it(x):\n    return x\n\n\ndef double"),
    "other functions": CORE.replace("return x * 3", "return x + x + x"),
}

CHANGES = {
    "other operation": CORE.replace("return x * times", "return x * times + 0"),
    "new keyword": CORE.replace("(x, *, times=2)", "(x, *, times=2, by=1)"),
    "keyword renamed": CORE.replace("times", "factor"),
    "another default": CORE.replace("times=2", "times=2.0"),
    "a decorator": CORE.replace("\ndef double", "\ndef same(function):\n    return function\n\n\n@same\ndef double"),
    "asynchronous": CORE.replace("def double", "async def double"),
    "fixed": CORE.replace("    return x * times", "    return times * x"),
}


@pytest.mark.parametrize("what", HARMLESS)
def test_a_later_release_whose_code_runs_the_same_is_repaired(create: Create, what: str) -> None:
    assert what == "nothing" or HARMLESS[what] != CORE
    status = future(create, HARMLESS[what])
    assert status.state is PatchState.APPLIED
    assert status.reason.startswith("unmeasured release, code unchanged (")
    assert status.reason.endswith("2.0; measured up to 1.0)")


@pytest.mark.parametrize("what", CHANGES)
def test_a_later_release_whose_code_has_changed_is_left_alone_and_it_is_said_once(create: Create, what: str) -> None:
    assert CHANGES[what] != CORE
    status = future(create, CHANGES[what], said=1)
    assert (status.state, status.detection) == (PatchState.FAILED, Detection.UNKNOWN)
    pattern = (
        r"unmeasured release, code changed \((fakelib\d+) 2\.0; measured up to 1\.0\): \1\.core\.double is not the "
        r"code this was proven on \(fingerprint [0-9a-f]{12}\)"
    )
    assert re.fullmatch(pattern, status.reason)


def test_an_optional_target_that_has_changed_keeps_the_whole_patch_off(create: Create) -> None:
    status = future(
        create,
        CORE.replace("x * 3", "x + x + x"),
        lambda library: library.target(source=CORE),
        lambda library: library.target("triple", source=CORE, optional=True),
        said=1,
    )
    assert status.state is PatchState.FAILED
    assert "core.triple is not the code" in status.reason


@pytest.mark.parametrize("new", ["double = 3", "class double:\n    pass", "import math\ndouble = math.sqrt"])
def test_a_target_that_is_no_function_any_more_is_unknown_code(create: Create, new: str) -> None:
    core = CORE.replace("def double", "def was_double") + f"\n\n{new}\n"
    status = future(create, core, said=1)
    assert (status.state, status.detection) == (PatchState.FAILED, Detection.UNKNOWN)
    assert status.reason.startswith("unmeasured release, code ")


def test_a_removed_target_is_changed_code(create: Create) -> None:
    status = future(create, CORE.replace("def double", "def gone"), said=1)
    assert (status.state, status.detection) == (PatchState.FAILED, Detection.UNKNOWN)
    assert re.fullmatch(
        r"unmeasured release, code changed \(.*\): fakelib\d+\.core\.double does not exist", status.reason
    )


def test_a_detect_that_no_longer_finds_what_it_looks_at_is_unknown_code(create: Create) -> None:
    library = create(version=FUTURE)
    engine = installed(library.patch(detect=lambda: getattr(library.load(), "has_gone")))  # noqa: B009
    _, said = collected(library.load)
    status = engine.status()[ID]
    assert len(said) == 1
    assert (status.state, status.detection) == (PatchState.FAILED, Detection.UNKNOWN)
    assert status.reason.startswith("unmeasured release, code unknown (")
    assert "has_gone" in status.reason


def test_an_upgrade_under_a_running_python_is_not_taken_for_unknown_code(create: Create) -> None:
    library = create(version=FUTURE, installed="3.0")
    engine = installed(library.patch())
    collected(library.load)
    assert "restart Python" in engine.status()[ID].reason
    assert engine.status()[ID].detection is None


def test_within_what_was_measured_the_release_is_not_blamed(create: Create) -> None:
    status = future(create, CHANGES["other operation"], version="1.0", said=1)
    pattern = (
        r"the code of fakelib\d+\.core\.double is unknown \(fingerprint [0-9a-f]{12}\): edited, or replaced by .*"
    )
    assert re.fullmatch(pattern, status.reason)
    assert status.detection is Detection.UNKNOWN


def test_strict_refuses_changed_code(create: Create, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMA4_COMPAT_STRICT", "1")
    library = create(version=FUTURE, core=CHANGES["new keyword"])
    installed(library.patch(library.target(source=CORE)))
    for _ in range(2):
        with pytest.raises(Gemma4CompatError, match="unmeasured release, code changed"):
            library.load()


def test_a_range_closed_by_the_fix_says_not_needed_whatever_the_code(create: Create) -> None:
    library = create(version=FUTURE, core=CHANGES["fixed"])
    engine = installed(library.patch(library.target(source=CORE), affected=">=1,<2.0", fixed="2.0"))
    library.load()  # a warning of ours is an error here
    assert engine.status()[ID].state is PatchState.NOT_NEEDED


def test_what_a_target_calls_is_not_looked_at(create: Create) -> None:
    """The limit that doctor's reproductions are for; see _fingerprint.py."""
    helper = "\n\ndef factor():\n    return 2\n\n\ndef scaled(x):\n    return x * factor()\n"
    library = create(version=FUTURE, core=CORE + helper.replace("return 2", "return 3"))
    engine = installed(library.patch(library.target("scaled", source=CORE + helper)))
    assert library.load().scaled(2) == ("patched", 6)
    assert engine.status()[ID].reason.startswith("unmeasured release, code unchanged")


# ------------------------------------------------------------------------------- modules that a release does not have


def forget(library: Library, module: str) -> None:
    (library.folder / library.name / f"{module}.py").unlink()
    importlib.invalidate_caches()


def test_a_module_that_is_gone_is_in_the_status_and_said_once_by_install(create: Create) -> None:
    library = create(version=FUTURE, extra="")
    engine = installed(library.patch())
    forget(library, "core")
    assert engine.status()[ID].reason == f"waiting for the import of {library.name}", "nothing of it is imported"
    library.load("extra")
    status = engine.status()[ID]
    assert (status.state, status.detection) == (PatchState.FAILED, Detection.UNKNOWN)
    assert status.reason == (
        f"unmeasured release, code changed ({library.name} 2.0; measured up to 1.0): "
        f"module {library.name}.core does not exist in {library.name} 2.0"
    )
    assert len(collected(engine.install)[1]) == 1
    assert collected(lambda: (engine.status(), engine.install()))[1] == []
    assert dataclasses.replace(engine.status()[ID], at=0.0) == dataclasses.replace(status, at=0.0)
    assert f"{library.name}.core" not in sys.modules


def test_a_module_that_is_gone_from_a_measured_release(create: Create) -> None:
    library = create()
    forget(library, "core")
    engine = installed(library.patch())
    library.load("__init__")
    assert engine.status()[ID].reason == f"module {library.name}.core does not exist in {library.name} 1.0"
    assert len(collected(engine.install)[1]) == 1


@pytest.mark.parametrize("files", [[], ["b/__init__.py"], ["b/__init__.py", "b/c.py"]])
def test_a_package_that_is_gone_or_became_a_module(create: Create, files: list[str]) -> None:
    """Of ``b.c.leaf``, ``b`` is gone, ``b.c`` is gone, or ``b.c`` is a module."""
    library = create(version=FUTURE)
    target = Target(module=f"{library.name}.b.c.leaf", name="double", replacement=tagged, known={})
    (library.folder / "leaf.py").write_text("")  # elsewhere on sys.path, so not what is looked for
    engine = installed(library.patch(target))
    library.load("__init__")
    for file in files:
        path = library.folder / library.name / file
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
        library.load(file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    status = engine.status()[ID]
    assert status.state is PatchState.FAILED
    assert "b.c.leaf does not exist in" in status.reason
    assert len(collected(engine.install)[1]) == 1


def test_a_module_that_nobody_imported_yet_is_waited_for(library: Library) -> None:
    engine = installed(library.patch())
    library.load("__init__")
    assert engine.status()[ID].state is PatchState.PENDING
    assert f"{library.name}.core" not in sys.modules, "looking for it imported it"
    assert library.load().double(2) == ("patched", 4)


def test_a_module_that_a_release_outside_the_range_does_not_have_is_not_missed(create: Create) -> None:
    library = create()
    forget(library, "core")
    engine = installed(library.patch(affected=">=3", measured="3.0"))
    library.load("__init__")
    assert engine.status()[ID].state is PatchState.NOT_NEEDED  # a warning of ours is an error here


@pytest.mark.parametrize("said", [False, True])
def test_a_module_that_turns_up_after_all_is_repaired(create: Create, said: bool) -> None:
    library = create()
    forget(library, "core")
    engine = installed(library.patch())
    library.load("__init__")
    assert engine.status()[ID].state is PatchState.FAILED
    if said:
        collected(engine.install)
    library.write("core", CORE)
    assert library.load().double(2) == ("patched", 4)
    assert engine.status()[ID].state is PatchState.APPLIED


def test_a_module_that_turns_up_after_revert_is_left_alone(create: Create) -> None:
    library = create()
    forget(library, "core")
    engine = installed(library.patch())
    library.load("__init__")
    collected(engine.install)
    engine.revert(ID)
    library.write("core", CORE)
    assert library.load().double(2) == 4


def test_strict_refuses_to_go_on_without_the_module(create: Create, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMA4_COMPAT_STRICT", "1")
    library = create()
    forget(library, "core")
    engine = installed(library.patch())
    library.load("__init__")
    for _ in range(2):
        with pytest.raises(Gemma4CompatError, match="does not exist"):
            engine.install()
        assert engine.status()[ID].state is PatchState.FAILED, "it can still be looked at"


def test_an_optional_module_that_is_gone_is_not_missed(create: Create) -> None:
    library = create()
    gone = library.target("double", module="gone", known={}, optional=True)
    engine = installed(library.patch(library.target(), gone))
    assert library.load().double(2) == ("patched", 4)
    assert engine.status()[ID].state is PatchState.APPLIED


def test_a_library_in_a_zip_file_is_searched_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zipfile

    library = Library.create(tmp_path / "source", version="1.0")
    with zipfile.ZipFile(tmp_path / "library.zip", "w") as archive:
        for file in sorted(library.folder.rglob("*")):
            archive.write(file, file.relative_to(library.folder))
    monkeypatch.syspath_prepend(tmp_path / "library.zip")
    there = library.patch()
    gone = library.patch(library.target("double", module="gone", known={}), id=OTHER)
    engine = installed(there, gone)
    try:
        library.load("__init__")
        statuses = engine.status()
        assert statuses[ID].state is PatchState.PENDING
        assert statuses[OTHER].state is PatchState.FAILED
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == library.name]:
            del sys.modules[name]
