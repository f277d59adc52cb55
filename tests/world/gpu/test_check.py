"""``gemma4-compat check`` on a GPU: the same bits, replays, peaks beside the plan, and what a filled card is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._plan.cards import measured
from tests.helpers import child


def checked(tmp_path: Path, *arguments: str, **environment: str) -> tuple[Any, str]:
    """The report, and what was printed."""
    file = tmp_path / "report.json"
    done = child("-m", "gemma4_compat", "check", *arguments, "--json", str(file), environment=environment)
    assert file.exists(), done.stderr
    return measured.read(file.read_bytes(), "report"), done.stdout


def test_a_tiny_model(tmp_path: Path) -> None:
    report, said = checked(tmp_path)
    assert report.verdict.ok, said
    assert report.machine.copies.pinned > report.machine.copies.pageable > 0
    assert len(report.placements) == 3
    for placement in report.placements:
        assert placement.replayed > 0
        assert placement.running_peak > 0
        answers = [answer for answer in placement.answers if answer.way == "fast against eager"]
        assert [answer.equal for answer in answers] == [True, True]


def test_a_patch_that_is_off(tmp_path: Path) -> None:
    report, said = checked(tmp_path, "--quick", GEMMA4_COMPAT_DISABLE="transformers-quantize-offloaded")
    assert not report.verdict.ok
    assert "Off: transformers-quantize-offloaded." in said


def test_a_filled_card(tmp_path: Path) -> None:
    import torch

    free, total = torch.cuda.mem_get_info()
    if free < total // 2:
        pytest.skip("the card is filled already")
    ballast = torch.empty(free - (4 << 30), dtype=torch.uint8, device="cuda")
    report, said = checked(tmp_path, "--quick", "--vram", "8GiB")
    del ballast
    torch.cuda.empty_cache()
    assert report.verdict.ok, said
    assert "other programs hold" in said.lower()
    assert report.budget < 4 << 30
