"""What was measured is stored once, and comes back as it was."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from tools import evidence
from tools.matrix import stacks

STACKS = stacks.read()
PATCHES = [patch.id for patch in gemma4_compat.patches()]
RUN = {"defect": False, "detail": "bit-exact", "parity": None}
ENTRY: dict[str, Any] = {
    "verdict": "affected, repaired",
    "claimed": True,
    "off": {**RUN, "defect": True, "detail": "KeyError: 3"},
    "reverted": {**RUN, "defect": True, "detail": "KeyError: 3"},
    "on": {**RUN, "parity": 0.0},
    "state": "applied",
    "tests": {"passed": 3, "failed": 0, "error": 0, "skipped": 0},
    "failures": {},
    "skipped": [],
    "seconds": 2,
    "date": "2026-11-26",
    "python": "3.11.7",
    "torch": "2.13.0+cpu",
}


def result(name: str, **patches: dict[str, Any]) -> dict[str, Any]:
    stack = STACKS[name]
    pins = dict(stack.pins)
    return {"cell": name, "ok": True, "why": stack.why, "pins": pins, "versions": pins | {"packaging": "26"}} | {
        "patches": patches
    }


def files(folder: Path) -> dict[str, str]:
    return {file.relative_to(folder).as_posix(): file.read_text(encoding="utf-8") for file in folder.rglob("*.json")}


def test_a_result_comes_back_as_it_was(tmp_path: Path) -> None:
    bad = {**ENTRY, "tests": {**ENTRY["tests"], "failed": 1}, "failures": {"test_x": "no"}, "skipped": ["no GPU"]}
    bad |= {"reverted": {**RUN, "parity": 0.5}, "seconds": None}
    written = {"newest": result("newest", a=ENTRY, b=bad), "thread": result("thread", a=ENTRY)}
    evidence.write_matrix(copy.deepcopy(written), STACKS, tmp_path)
    assert evidence.matrix(STACKS, tmp_path, ["a", "b"]) == written


def test_the_same_outcome_in_two_stacks_is_written_once(tmp_path: Path) -> None:
    later = {**ENTRY, "seconds": 9, "date": "2026-11-27"}
    evidence.write_matrix({"thread": result("thread", a=later), "newest": result("newest", a=ENTRY)}, STACKS, tmp_path)
    (outcome,) = evidence.read(tmp_path / "patches" / "a.json")["matrix"]
    assert outcome["seen"] == {
        "2026-11-26, 3.11.7, 2.13.0+cpu": {"newest": 2},
        "2026-11-27, 3.11.7, 2.13.0+cpu": {"thread": 9},
    }


def test_another_measurement_replaces_that_of_its_stack_and_nothing_else(tmp_path: Path) -> None:
    evidence.write_matrix({name: result(name, a=ENTRY, b=ENTRY) for name in ("newest", "thread")}, STACKS, tmp_path)
    before = files(tmp_path)
    other = {**ENTRY, "verdict": "not affected", "off": RUN, "reverted": RUN}
    evidence.write_matrix({"newest": result("newest", a=other, b=ENTRY)}, STACKS, tmp_path)
    after = files(tmp_path)
    assert {name for name in after if after[name] != before[name]} == {"patches/a.json"}
    found = evidence.matrix(STACKS, tmp_path)
    assert [found[name]["patches"]["a"]["verdict"] for name in ("newest", "thread")] == [
        "not affected",
        "affected, repaired",
    ]
    evidence.write_matrix({name: result(name, b=ENTRY) for name in ("newest", "thread")}, STACKS, tmp_path)
    assert "patches/a.json" not in files(tmp_path)


def test_what_a_gpu_gave_comes_back_and_a_later_run_keeps_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "_patches", lambda: {"a", "b"})
    side = {**RUN, "applicable": True, "state": "applied", "seconds": 1.5}
    states = {"patches": {"a": "applied", "b": "skipped"}, "error": None}
    run = {
        "device": "H100",
        "measured": {"a": {"without": side, "with": {**side, "seconds": 2.5}}, "e2b": {"without": [states, states]}},
    }
    evidence.write_gpu("newest", copy.deepcopy(run), tmp_path)
    assert evidence.gpu("newest", tmp_path) == run
    evidence.write_gpu("newest", {"device": "H100", "measured": {"b": {"without": side, "with": side}}}, tmp_path)
    assert set(evidence.gpu("newest", tmp_path)["measured"]) == {"a", "b"}


@pytest.mark.parametrize("data", [{}, [], None, "x" * 200, {"a": [1, {"b": "x" * 200}]}, [[1.0, 0.1]] * 40])
def test_the_text_is_the_data(data: Any) -> None:
    assert json.loads(evidence.text(data)) == data


def test_what_is_committed_is_as_the_tools_write_it(tmp_path: Path) -> None:
    """So that the next measurement changes what it measured, and no other line."""
    evidence.write_matrix(evidence.matrix(STACKS, patches=PATCHES), STACKS, tmp_path)
    for file in (evidence.EVIDENCE / "gpu").glob("*.json"):
        if "device" in (run := evidence.gpu(file.stem)):
            evidence.write_gpu(file.stem, run, tmp_path)
    committed, written = files(evidence.EVIDENCE), files(tmp_path)
    assert {name for name in committed if name.startswith("patches/")} == {
        f"patches/{patch}.json" for patch in PATCHES
    }
    for name, text in committed.items():
        if name in ("matrix.json", "variants.json") or name.startswith(("patches/", "gpu/")):
            assert evidence.text(json.loads(text)) + "\n" == text, name
    for name, text in written.items():
        known = json.loads(committed[name])
        if name.startswith("patches/"):
            known.pop("variants", None)  # of which only the stack's last date is known when they are read
        assert evidence.text(known) + "\n" == text, name
