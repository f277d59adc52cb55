"""benchmarks/training/short_steps.py: its ways run what they are called, and its problems are found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")
pytest.importorskip("transformers.modeling_layers")
from benchmarks.training import short_steps
from gemma4_compat._gemma4.state import checkpointing

pytestmark = pytest.mark.skipif(not checkpointing.is_in_forward(), reason="train_fast beside checkpointing: 5.23")


def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_steps, "TURNS", 1)
    file = tmp_path / "run.json"
    given = f"--shape tiny --sequences 32 --bits 32 --rank 2 --steps 1 --seconds 300 --json {file}"
    assert short_steps.main([*given.split(), "--ways", ",".join(short_steps.WAYS)]) == 0
    result = json.loads(file.read_text(encoding="utf-8"))
    assert [*result["cells"]] == [f"32 {way} {turn}" for turn in (1,) for way in short_steps.WAYS]
    for found in result["bits"].values():
        assert found["loss_equal"]
        assert found["gradients_equal"] == found["gradients"] > 0
    plain, fast = result["cells"]["32 plain 1"], result["cells"]["32 fast 1"]
    assert plain["losses"] == fast["losses"]
    assert fast["replayed"] > fast["captured"] > 0
    assert fast["reasons"] == []


def cell(way: str, losses: list[str], **more: Any) -> dict[str, Any]:
    return {"sequence": 32, "way": way, "losses": losses, **more}


@pytest.mark.parametrize(
    ("cells", "problem"),
    [
        ([cell("plain", ["1.5", "nan"])], "0: a loss is not finite"),
        ([cell("fast", ["1.5"], replayed=0)], "0: nothing was replayed"),
        ([cell("plain", ["1.5"]), cell("fast", ["1.6"], replayed=3)], "1: another loss"),
    ],
)
def test_problems(cells: list[dict[str, Any]], problem: str) -> None:
    assert [*short_steps.problems({str(number): one for number, one in enumerate(cells)})] == [problem]


def test_no_problems() -> None:
    cells = {"a": cell("plain", ["1.5", "1.4"]), "b": cell("fast", ["1.5", "1.3"], replayed=3)}
    assert [*short_steps.problems(cells)] == []
