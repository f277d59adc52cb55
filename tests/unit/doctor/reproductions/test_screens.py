"""What a program prints: ``status()``, ``needed()`` and ``doctor()`` fit on one screen, the summary first."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat import Gemma4CompatError, PatchState, Reason, Verdict, _shim
from gemma4_compat._doctor.reproductions import findings
from gemma4_compat._engine.reports.report import Statuses
from tests.unit.doctor.reproductions import test_doctor

IDS = [patch.id for patch in gemma4_compat.patches()]
AREAS = {patch.area for patch in gemma4_compat.patches()}


def lines_of(shown: object) -> list[str]:
    lines = str(shown).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    return lines


def test_status_prints_how_many_patches_are_in_which_state_by_area() -> None:
    statuses = gemma4_compat.status()
    lines = lines_of(statuses)
    assert lines[0].startswith("In this process: ")
    assert {line.split()[0] for line in lines if line} >= AREAS
    assert list(statuses) == IDS
    assert statuses == dict(statuses)
    assert str(copy.copy(statuses)) == str(statuses)


def test_status_names_what_needs_attention() -> None:
    statuses = gemma4_compat.status()
    changed = dict(statuses)
    for number, patch_id in enumerate(IDS[:7]):
        changed[patch_id] = dataclasses.replace(
            changed[patch_id],
            state=PatchState.FAILED,
            reason_code=Reason.CODE_DIFFERS,
            reason=f"why {number} {'long ' * 99}",
        )
    shown = Statuses(changed, {patch.id: patch.area for patch in gemma4_compat.patches()})
    lines = lines_of(shown)
    assert any(line.startswith(f"{IDS[0]}, failed: why 0 long") for line in lines)
    assert "... and 4 more" in lines
    assert "7 failed" in lines[0]
    changed[IDS[8]] = dataclasses.replace(changed[IDS[8]], overridden=("x.y.z",))
    assert "another library replaced x.y.z" in str(Statuses({IDS[8]: changed[IDS[8]]}, {IDS[8]: "offload"}))


def test_needed_prints_the_verdicts_by_area(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a path may be wider than a screen
    here = gemma4_compat.needed()
    assert any(here.summary in " ".join(part.split()) for part in str(here).split("\n\n"))
    assert len(lines_of(here)) > len(AREAS)
    file = Path("requirements.txt")
    file.write_text("transformers==5.6.2\naccelerate==1.13.0\npeft==0.19.1\nbitsandbytes==0.49.2\n")
    for given in (file, str(file)):
        found = gemma4_compat.needed(given)
        assert not found.droppable
        assert len(found.needs) == len(IDS)
        assert lines_of(found)[0].startswith(str(file)[:60])
    with pytest.raises(Gemma4CompatError, match="the name must tell what this is"):
        gemma4_compat.needed(tmp_path / "x.cfg")


def faked(monkeypatch: pytest.MonkeyPatch, broken: frozenset[str] = frozenset()) -> None:
    monkeypatch.setattr(findings, "stack", lambda: dict.fromkeys(findings.STACK, "1.0"))
    monkeypatch.setattr(findings.children, "can_fork", lambda: False)
    monkeypatch.setattr(findings.children, "alone", test_doctor.Children(broken))


def test_doctor_returns_its_findings_and_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    faked(monkeypatch)
    found = gemma4_compat.doctor()
    assert found.ok
    assert [item.id for item in found.findings] == IDS
    assert lines_of(found)[0] == lines_of(found)[-1] == found.summary == f"{len(IDS)} repaired: this stack is fine."
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines()[0].startswith(f"gemma4_compat: reproducing {len(IDS)} defects")
    assert f"[{len(IDS)}/{len(IDS)}] after " in told.err.splitlines()[-1]


def test_doctor_examines_the_patches_that_it_is_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    faked(monkeypatch, frozenset({IDS[1]}))
    found = gemma4_compat.doctor(IDS[1], IDS[0], progress=False)
    assert capsys.readouterr().err == ""
    assert not found.ok
    assert [(item.id, item.verdict) for item in found.findings] == [
        (IDS[0], Verdict.REPAIRED),
        (IDS[1], Verdict.REMAINS),
    ]
    assert f"because of {IDS[1]}" in found.summary
    with pytest.raises(Gemma4CompatError, match="did you mean 'peft-keep-dispatch'"):
        gemma4_compat.doctor("peft-keep-dispach")


FEATURES = {"offloaded": _shim.opt_in.OFFLOADED, "experts": _shim.opt_in.EXPERTS}


@pytest.mark.parametrize("names", [["offloaded"], ["experts"], ["offloaded", "experts"]], ids=str)
def test_quantize_without_with_says_that_it_does_nothing(names: list[str]) -> None:
    said = rf"quantize\({', '.join(f'{name}=True' for name in names)}\)"
    ids = ",".join(FEATURES[name].id for name in names)
    match = rf"{said} without `with` does nothing; .* `with gemma4_compat\.{said}:`, .*ENABLE={ids}"
    with pytest.warns(gemma4_compat.Gemma4CompatWarning, match=match) as caught:
        gemma4_compat.quantize(**dict.fromkeys(names, True))
    assert caught[0].filename == __file__


@pytest.mark.parametrize("names", [["offloaded"], ["experts"], ["offloaded", "experts"]], ids=str)
def test_quantize_is_on_inside_with_and_in_a_decorated_function(names: list[str]) -> None:
    def on() -> list[str]:
        return [name for name, feature in FEATURES.items() if feature.is_enabled()]

    given = dict.fromkeys(names, True)
    outer = gemma4_compat.quantize(**given)
    with outer, gemma4_compat.quantize(**given):
        assert on() == names
    assert on() == []
    decorated = gemma4_compat.quantize(**given)(on)
    assert (decorated(), decorated(), on()) == (names, names, [])


def test_quantize_needs_to_know_what() -> None:
    with pytest.raises(Gemma4CompatError, match=r"quantize\(\) needs offloaded=True, experts=True or packed=True"):
        gemma4_compat.quantize()
