"""The matrix: every gate has a stack on each side, every stack a result, and every result agrees with every claim."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

import gemma4_compat
from gemma4_compat import Patch
from gemma4_compat._engine import versions as _versions
from tests.collecting import collect_failures
from tests.helpers import ON_A_GPU, ROOT, WITH_OTHER_LIBRARIES
from tools import evidence
from tools.matrix import __main__ as command
from tools.matrix import bisection, environments, index, measure, run, stacks
from tools.pages import gpu

STACKS = stacks.read()
RESULTS = stacks.results()
RELEASES = stacks.releases()
GATES = [gate for patch in gemma4_compat.patches() for gate in stacks.gates(patch, RELEASES)]
IN_CI = [stack for stack in STACKS.values() if stack.ci]


@functools.cache
def result(name: str) -> dict[str, Any]:
    return RESULTS[name]


@functools.cache
def in_ci(name: str) -> list[Patch]:
    """What CI runs in the stack of that name."""
    return stacks.patches_in_ci(STACKS[name], RELEASES)


def verdict(stack: str, patch_id: str) -> str | None:
    """What was measured of a patch in a stack; None where it was not."""
    entry = result(stack)["patches"].get(patch_id)
    return None if entry is None else str(entry["verdict"])


# ---------------------------------------------------------------------------------------------------------- the stacks


def test_every_stack_pins_listed_releases_and_says_why() -> None:
    assert len([stack for stack in STACKS.values() if stack.tests == "all"]) >= 20
    assert len(STACKS) >= 24
    for stack in STACKS.values():
        assert stack.why
        assert stack.tests in ("all", "reproductions")
        assert stack.ci in ("", "gates", "all", "suite")
        for library, pin in stack.pins.items():
            assert pin in RELEASES[library], f"{stack.name}: {library} {pin}"
    stacks = [tuple(stack.pins.items()) for stack in STACKS.values()]
    assert len(set(stacks)) == len(stacks), "two stacks are the same stack"


@pytest.mark.parametrize("library", stacks.LIBRARIES)
def test_releases_are_in_order_and_begin_at_the_supported_floor(library: str) -> None:
    listed = list(map(Version, RELEASES[library]))
    assert listed == sorted(set(listed))
    assert listed[0] == Version(_versions.OLDEST[library])


def test_there_are_stacks_for_the_oldest_the_threads_and_the_newest_stack() -> None:
    assert STACKS["oldest"].pins == _versions.OLDEST
    for name in ("newest", "thread"):
        constraints = (ROOT / "constraints" / f"{name}.txt").read_text(encoding="utf-8")
        pinned = dict(re.findall(r"^(\w+)==(\S+)$", constraints, re.MULTILINE))
        assert {library: pinned[library] for library in stacks.LIBRARIES} == STACKS[name].pins
    assert STACKS["newest"].pins == {library: listed[-1] for library, listed in RELEASES.items()}


def test_there_are_gates() -> None:
    assert {gate.distribution for gate in GATES} >= {"transformers", "accelerate", "bitsandbytes"}


@pytest.mark.parametrize("among", ["everywhere", "in CI"])
@collect_failures(gate=GATES)
def test_every_gate_has_two_stacks_that_differ_in_nothing_else(gate: Any, among: str) -> None:
    pairs = stacks.pairs(gate, STACKS.values() if among == "everywhere" else IN_CI)
    assert pairs
    for stack in {stack.name: stack for pair in pairs for stack in pair}.values() if among == "in CI" else ():
        assert stack.ci == "suite" or gate.patch in in_ci(stack.name)


@collect_failures(stack=[stack for stack in IN_CI if stack.ci == "gates"])
def test_ci_has_something_to_run_in_a_stack_that_is_there_for_gates(stack: stacks.Stack) -> None:
    assert in_ci(stack.name)


def test_the_measured_release_of_every_patch_is_in_a_stack_that_claims_it() -> None:
    for patch in gemma4_compat.patches():
        held = [stack for stack in STACKS.values() if stack.pins[patch.distribution] == patch.measured]
        assert any(stacks.claimed(patch, stack.pins) for stack in held), patch.id


# -------------------------------------------------------------------------------------------------------- the results


def test_every_stack_has_a_result_and_every_result_a_stack() -> None:
    assert list(evidence.read(evidence.EVIDENCE / "matrix.json")) == list(STACKS)
    assert all(RESULTS[name]["patches"] for name in STACKS)
    for file in evidence.EVIDENCE.rglob("*.json"):
        assert "site-packages" not in file.read_text(encoding="utf-8"), f"{file.name} names paths of a machine"


@collect_failures(name=STACKS)
def test_a_result_is_of_the_pins_and_as_claimed(name: str) -> None:
    """A new patch may lack results, but not where the tests below look: the ends of its range."""
    found = result(name)
    assert found["ok"] is True
    assert found["pins"] == STACKS[name].pins
    assert {library: found["versions"][library] for library in stacks.LIBRARIES} == STACKS[name].pins
    known = [patch.id for patch in gemma4_compat.patches() if patch.id in found["patches"]]
    assert [patch_id for patch_id in found["patches"] if patch_id in known] == known  # of retired ones results stay
    if name in ("newest", "thread"):
        assert known == [patch.id for patch in gemma4_compat.patches()]
    for patch in gemma4_compat.patches():
        if (entry := found["patches"].get(patch.id)) is None:
            continue
        inside = stacks.claimed(patch, STACKS[name].pins)
        assert entry["claimed"] == inside, f"{patch.id} claims something else since; run nox -s matrix"
        assert entry["verdict"] in ({measure.REPAIRED, measure.NOT_APPLICABLE} if inside else OUTSIDE), patch.id
        assert entry["tests"]["passed"] >= 3  # without the patch, with it, undone
        assert not entry["tests"]["failed"] + entry["tests"]["error"]


ON_ANY = [patch for patch in gemma4_compat.patches() if patch.id not in (*ON_A_GPU, *WITH_OTHER_LIBRARIES)]
OUTSIDE = {measure.NOT_AFFECTED, measure.NOT_APPLICABLE}


@pytest.mark.parametrize("patch_id", ON_A_GPU)
def test_a_patch_for_gpus_was_seen_to_repair_on_one(patch_id: str) -> None:
    patch = {patch.id: patch for patch in gemma4_compat.patches()}[patch_id]
    runs = [evidence.gpu(name) for name in gpu.RESULTS]
    seen = [
        (run["measured"][patch_id], _versions.admits(patch.affected, run["versions"][patch.distribution]))
        for run in runs
        if patch_id in run.get("measured", {})
    ]
    assert any(affected for _, affected in seen)
    for found, affected in seen:
        assert (found["without"]["defect"], found["with"]["defect"]) == (affected, False)
    assert {verdict(name, patch_id) for name in STACKS} - {None} == {measure.NOT_APPLICABLE}


@collect_failures(patch=ON_ANY)
def test_every_patch_was_seen_to_repair_its_oldest_and_its_newest_release(patch: Patch) -> None:
    inside = [stack for stack in STACKS.values() if stacks.claimed(patch, stack.pins)]
    repaired = {
        stack.pins[patch.distribution] for stack in inside if verdict(stack.name, patch.id) == measure.REPAIRED
    }
    listed = [name for name in RELEASES[patch.distribution] if _versions.admits(patch.affected, name)]
    assert {listed[0], patch.measured} <= repaired


@collect_failures(gate=[gate for gate in GATES if gate.patch in ON_ANY])
def test_both_sides_of_every_gate_were_measured(gate: Any) -> None:
    verdicts = [
        {verdict(stack.name, gate.patch.id) for stack in group} - {None}
        for group in stacks.sides(gate, STACKS.values())
    ]
    assert measure.REPAIRED in verdicts[0] ^ verdicts[1], verdicts
    assert (verdicts[0] | verdicts[1]) & OUTSIDE, verdicts


# -------------------------------------------------------------------------------------------------------- the verdicts


def run_of(defect: bool, *, state: str = "applied", applicable: bool = True) -> dict[str, Any]:
    return {"defect": defect, "detail": "", "parity": None, "state": state, "applicable": applicable}


@pytest.mark.parametrize(
    "off, on, reverted, expected",
    [
        (True, False, True, measure.REPAIRED),
        (False, False, False, measure.NOT_AFFECTED),
        (True, True, True, measure.UNREPAIRED),
        (False, True, False, measure.BROKEN),
        (True, False, False, measure.BROKEN),  # undoing must give the defect back
        (False, False, True, measure.BROKEN),
    ],
)
def test_the_verdict_on_one_patch(off: bool, on: bool, reverted: bool, expected: str) -> None:
    runs = {"off": run_of(off), "on": run_of(on), "reverted": run_of(reverted)}
    assert measure.verdict(runs) == expected
    assert measure.verdict({key: runs[key] for key in ("off", "on")}) == measure.UNKNOWN


def test_a_result_does_not_name_files_of_the_machine() -> None:
    seen = run_of(False) | {
        "detail": "cannot import name 'x' from 'peft' (/home/me/peft/__init__.py); the rest (kept)"
    }
    assert measure.shown(seen)["detail"] == "cannot import name 'x' from 'peft'; the rest (kept)"


def test_what_cannot_happen_here_is_not_applicable() -> None:
    nothing = run_of(False, applicable=False)
    assert measure.verdict({"off": nothing, "on": nothing, "reverted": nothing}) == measure.NOT_APPLICABLE


SEEN = '{"defect": true, "detail": "d", "parity": null, "applicable": true}'
REPORT = f"""<testsuites><testsuite>
<testcase classname="tests.patches.test_FILE.TestPromise" name="test_off" time="1.5">
  <properties><property name="reproduction off" value='{SEEN}'/></properties></testcase>
<testcase classname="tests.patches.test_FILE" name="test_bad" time="0.1">
  <failure message="assert 1 == 2">...</failure></testcase>
<testcase classname="tests.patches.test_FILE" name="test_not" time="0">
  <skipped message="no GPU">...</skipped></testcase>
</testsuite></testsuites>"""


def test_a_stack_in_which_a_test_fails_is_not_ok_and_says_which(tmp_path: Path) -> None:
    patch = gemma4_compat.patches()[0]
    report = tmp_path / "report.xml"
    report.write_text(REPORT.replace("FILE", patch.id.replace("-", "_")), encoding="utf-8")
    tests = measure.read_report(report)
    assert [test["outcome"] for test in tests] == ["passed", "failed", "skipped"]
    assert tests[0]["reproductions"]["off"]["defect"] is True
    found = joined([patch], tests)
    assert not found["ok"]
    entry = found["patches"][patch.id]
    assert entry["failures"] == {"test_bad": "assert 1 == 2"}
    assert entry["skipped"] == ["no GPU"]
    assert entry["verdict"] == measure.UNKNOWN
    assert entry["tests"] == {"passed": 1, "failed": 1, "error": 0, "skipped": 1}
    assert f"{patch.id}::test_bad: assert 1 == 2" in run.line(found)


def passed(patch: Patch, *, applicable: bool = True) -> dict[str, Any]:
    runs = {shim: run_of(False, applicable=applicable) for shim in ("off", "on", "reverted")}
    name = patch.id.replace("-", "_")
    return {"file": name, "name": "y", "outcome": "passed", "message": "", "seconds": 1.0, "reproductions": runs}


def joined(patches: Sequence[Patch], tests: Sequence[dict[str, Any]], **versions: str) -> dict[str, Any]:
    stack = STACKS["newest"]
    part = measure.summarize(stack, {"python": "3", "torch": "2", **stack.pins, **versions}, patches, tests)
    found: dict[str, Any] = measure.joined(stack, [part], patches)
    return found


def test_a_stack_without_tests_or_with_other_releases_is_not_ok() -> None:
    patch = gemma4_compat.patches()[0]
    assert joined([patch], [passed(patch)])["ok"]
    assert not joined([], [])["ok"]
    assert not joined([patch], [])["ok"]
    found = joined([patch], [passed(patch)], peft="0.1")
    assert not found["ok"]
    assert found["error"] == "other releases than pinned: peft is 0.1"


def test_a_new_measurement_of_some_patches_leaves_what_is_known_of_the_others() -> None:
    one, other = gemma4_compat.patches()[:2]
    before = joined([one, other], [passed(one), passed(other)])
    again = joined([other], [passed(other, applicable=False)])
    found = measure.joined(STACKS["newest"], [before, again], [one, other])
    assert found["ok"]
    assert found["patches"][one.id] == before["patches"][one.id]
    assert found["patches"][other.id]["verdict"] == measure.NOT_APPLICABLE
    failed = measure.joined(STACKS["newest"], [before, {"error": "uv: no such release", "patches": {}}], [one, other])
    assert not failed["ok"]
    assert "uv: no such release" in run.line(failed)


@pytest.mark.parametrize("parts", [1, 2, 5, 100])
def test_a_stack_in_several_processes_has_every_patch_once(parts: int) -> None:
    patches = gemma4_compat.patches()
    slow = {patches[0].id: 10_000.0}
    groups = run.split(patches, parts, slow)
    assert sorted(patch.id for group in groups for patch in group) == sorted(patch.id for patch in patches)
    assert all(groups)
    if parts > 1:
        assert [patches[0]] in groups, "the slow one has company"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["run", "no-such-stack"], "no stack is named no-such-stack"),
        (["run", "--patches", "no-such-patch"], "no patch has the id no-such-patch"),
        (["run", "newest", "--ci"], "runs none of newest, so nothing would be measured"),
        (["run", "--ci", "--patches", "peft-keep-dispatch"], "leave out --patches"),
        (["bisect", "no-such-patch", "peft"], "no patch has the id 'no-such-patch'"),
        (["bisect", "peft-keep-dispatch", "numpy"], "'numpy' is none of transformers"),
        (["bisect", "peft-keep-dispatch", "peft", "--cell", "nowhere"], "no stack is named 'nowhere'"),
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_stack_without_a_gate_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stacks, "patches_in_ci", lambda stack, listed: [])
    assert command.main(["run", "--ci", "oldest"]) == 2
    assert "no patch has a gate at oldest: leave `ci` out of that entry in matrix.toml" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------------- bisection


def bisected(bad: Sequence[int], *, size: int = 16, known: int | None = None) -> tuple[Any, list[str]]:
    probes: list[str] = []

    def is_bad(release: str) -> bool:
        probes.append(release)
        return int(release) in bad

    return bisection.boundaries([str(n) for n in range(size)], str(bad[0] if known is None else known), is_bad), probes


@pytest.mark.parametrize("first", [0, 1, 7])
@pytest.mark.parametrize("last", [7, 9, 14, 15])
@pytest.mark.parametrize("known", ["first", "last"])
def test_a_bisection_finds_where_the_affected_releases_begin_and_end(first: int, last: int, known: str) -> None:
    found, probes = bisected(range(first, last + 1), known=first if known == "first" else last)
    assert (found.first_bad, found.last_bad) == (str(first), str(last))
    assert found.last_good_before == (None if first == 0 else str(first - 1))
    assert found.first_good_after == (None if last == 15 else str(last + 1))
    assert found.specifier == f">={first}" + ("" if last == 15 else f",<{last + 1}")
    assert len(set(probes)) <= 11, "not a bisection"


def test_a_bisection_needs_an_affected_release_to_begin_with() -> None:
    with pytest.raises(ValueError, match="the defect is not seen with 3"):
        bisected([5], known=3)


@pytest.fixture
def indexed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """``indexed(text)``: what pip says about every library."""

    def says(text: str) -> None:
        monkeypatch.setattr(environments, "checked", lambda command: text)

    return says


def test_releases_of_the_index_are_sorted_and_end_at_the_floor(indexed: Callable[[str], None]) -> None:
    indexed("peft (0.21.2)\nAvailable versions: 0.21.2, 0.21.10, 0.18.0, 0.18.0rc0, 0.17.1\n")
    assert index.releases("peft") == ["0.18.0", "0.21.2", "0.21.10"]


def test_bisecting_prints_the_range_and_fails_where_the_patch_says_another(
    indexed: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    indexed("Available versions: " + ", ".join(reversed(RELEASES["accelerate"])))
    monkeypatch.setattr(environments, "build", lambda folder, requirements: Path(requirements[1]))
    monkeypatch.setattr(
        bisection,
        "reproduce",
        lambda patch, python: run_of(str(python) in ("accelerate==1.12.0", "accelerate==1.13.0")),
    )
    arguments = ["--work", str(tmp_path), "bisect"]
    assert command.main([*arguments, "accelerate-hf-initialized", "accelerate"]) == 0
    wrote = capsys.readouterr().out
    assert "to write:   accelerate>=1.12.0,<1.14.0" in wrote
    assert "the two agree on every release" in wrote
    assert command.main([*arguments, "accelerate-tied-on-disk", "accelerate", "--bad", "1.13.0"]) == 1
    assert "THEY DIFFER on 1.14.0, 1.15.0" in capsys.readouterr().out


def test_an_environment_becomes_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same releases as in a new one: the newest that its requirements allow, and no package of the last stack."""
    folder, commands = tmp_path / "cells" / "place-1", []

    def checked(command: Sequence[str]) -> str:
        commands.append([word for word in command if not word.startswith((str(tmp_path), "/"))])
        if "venv" in command:
            folder.mkdir()
        return str(folder)

    monkeypatch.setattr(environments, "checked", checked)
    first = environments.build(folder, ["peft==0.18.0"], over=True)
    (folder / "kept").touch()
    assert environments.build(folder, ["peft==0.21.2"], over=True) == first
    assert (folder / "kept").exists()
    assert ["venv" in command for command in commands] == [True, False, False, False]
    assert {"--exact", "--upgrade", "peft==0.21.2"} <= set(commands[-1])
    environments.build(folder, ["peft==0.21.2"])
    assert not (folder / "kept").exists()
    assert "--exact" not in commands[-1]
