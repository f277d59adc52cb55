"""benchmarks/small_card/checks.py: what counts as a check that ended as it should, and the part of docs/CHECK.md."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.small_card import checks
from tools.pages import checks as page

GIB = 1 << 30
FAULT = checks.Run("disk", ["/a/checkpoint", "--quick"], 1, ["No space left on device", "The disk is full."])


def report(text: str) -> dict[str, Any]:
    place = {"title": "everything on the card", "loading_peak": 3 * GIB, "running_peak": 2 * GIB, "failures": []}
    planned = {"loading": 4 * GIB, "prefill": GIB, "decode": 5 * GIB}
    late = {"failures": [{"step": "load", "type": "Timeout"}]}
    return {
        "verdict": {"text": text},
        "machine": {"gpu": {"name": "NVIDIA T4"}},
        "date": "2026-11-28",
        "placements": [place | {"planned": planned}, place | {"title": "on the host", "planned": None} | late],
    }


def entry(run: checks.Run, code: int, said: str, text: str) -> dict[str, Any]:
    return checks.judged(run, code, said) | {"seconds": 61.2, "report": report(text)}


@pytest.mark.parametrize(
    "code, said, good, missing",
    [
        (1, "No space left\n  on device\n(os error 28) The disk is full.", True, []),
        (1, "RuntimeError: something else", False, ["No space left on device", "The disk is full."]),  # another fault
        (0, "No space left on device. The disk is full.", False, []),
        (2, "No space left on device. The disk is full.", False, []),  # it could not start
    ],
)
def test_a_fault_has_its_exit_code_and_says_what_it_is(code: int, said: str, good: bool, missing: list[str]) -> None:
    found = checks.judged(FAULT, code, said)
    assert (found["good"], found["missing"]) == (good, missing)
    assert found["arguments"] == ["--quick"], "no path of this machine"


def test_what_is_printed_has_verdict_peaks_and_what_is_missing() -> None:
    text = checks.line("disk", entry(FAULT, 1, "another error", "NOT as it should be: crash."))
    assert "disk: NOT AS IT SHOULD BE, exit 1, 61.2 s. NOT as it should be: crash." in text
    assert "everything on the card, GiB of those planned: loading 3.00 of 4.00, running 2.00 of 5.00" in text
    assert "did not say 'The disk is full.'" in text
    assert "| another error" in text


def test_runs_for_which_no_time_is_left_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"began": time.monotonic(), "limit": 100, "minutes": 5, "free": "12,8", "full": "", "only": ""}
    options = argparse.Namespace(**given, out=tmp_path / "new" / "checks.json")
    minutes = []

    def check(run: checks.Run, most: float) -> dict[str, Any]:
        minutes.append(most)
        options.began -= 70
        return entry(run, 0, checks.GOOD, checks.GOOD) | {"seconds": 70.0}

    monkeypatch.setattr(checks, "check", check)
    (tmp_path / "adapter").mkdir()
    runs: dict[str, Any] = {}
    measured = checks.Checks(options, tmp_path, {"runs": runs})
    for size in (12, 8):
        measured._began = options.began
        measured._one(measured._size(size, filled=False))
    assert runs["12GiB"]["good"]
    assert runs["8GiB"] == {"left_out": "30 s were left"}
    assert minutes == [pytest.approx(100 / 60, abs=0.1)], "a check ends when the time is over"


def test_the_page_has_peaks_beside_the_plan_and_what_each_fault_ends_with() -> None:
    size = checks.Run("12GiB", ["/a/checkpoint", "--quick"], 0, [checks.GOOD])
    runs = {
        "12GiB": entry(size, 0, checks.GOOD, "The same bits."),
        "disk": entry(FAULT, 1, "No space left on device The disk is full.", "NOT as it should be: a | b."),
        "patch": {"left_out": "mount: refused"},
    }
    text = page.of({"benchmarks/results/d/checks-E2B.json": {"shape": "E2B", "runs": runs}})
    assert "2 checks" in text
    assert "each ended as it should (NVIDIA T4, 2026-11-28" in text
    row = "| E2B | 12 GiB | everything on the card | 3 GiB | 4 GiB | 2 GiB | 5 GiB | The same bits. (61 s) |"
    assert row.replace(" ", "") in text.replace(".00", "").replace(" ", "")
    assert "| on the host; load: Timeout |" in text
    assert "| E2B | a full disk | NOT as it should be: a \\| b. | 61 s |" in text
    assert "a patch is off" not in text
    runs["12GiB"] = entry(size, 1, "", "NOT")
    assert "**1 did not end as it should**" in page.of({"x": {"shape": "E2B", "runs": runs}})
    assert page.of({}) == ""


def test_the_page_has_the_newest_result_of_each_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = checks.Run("6GiB", ["/a/checkpoint", "--quick"], 0, [])
    large = checks.Run("12GiB", ["/a/checkpoint", "--quick"], 0, [])
    files = {
        "2026-11-27-h100/checks-E2B-6GiB.json": {"6GiB": entry(small, 0, "", "It timed out.")},
        "2026-11-27-h100/checks-E2B.json": {"12GiB": entry(large, 0, "", "Still the newest.")},
        "2026-11-28-h200/checks-E2B.json": {
            "6GiB": entry(small, 0, "", "Measured again."),
            "12GiB": {"left_out": "3 s were left"},
        },
    }
    for name, runs in files.items():
        file = tmp_path / "benchmarks" / "results" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"shape": "E2B", "runs": runs}))
    monkeypatch.setattr(page, "ROOT", tmp_path)
    monkeypatch.setattr(page, "_RESULTS", tmp_path / "benchmarks" / "results")
    text = page.section()
    assert "2 checks" in text
    assert "It timed out." not in text
    assert text.index("Still the newest.") < text.index("Measured again."), "the larger size is first"
    assert "checks-E2B-6GiB.json" not in text
