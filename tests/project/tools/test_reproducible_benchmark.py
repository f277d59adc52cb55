"""benchmarks/training/reproducible.py: its ways run what they are called, and its problems are found."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("bitsandbytes")
pytest.importorskip("transformers.modeling_layers")
from benchmarks.training import reproducible
from gemma4_compat._gemma4.state import checkpointing

GIVEN = "--shape tiny --sequences 32 --rows 64 --shortest 5 --longest 20 --rank 2 --steps 1 --minutes 5"


@pytest.mark.skipif(not checkpointing.is_in_forward(), reason="train_fast beside checkpointing: 5.23")
def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    assert reproducible.main([*GIVEN.split(), "--out", str(file)]) == 0
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    assert {(cell["case"], cell["way"]) for cell in cells.values()} == {
        *(("32", way) for way in reproducible.DETERMINISTIC),
        *(("row of 64", way) for way in reproducible.PACKED),
    }
    assert cells["32, free, 1"]["losses"] == cells["32, filled, 2"]["losses"]  # a CPU is deterministic
    assert [cells[f"32, filled, {turn}"]["apart"] for turn in (1, 2)] == [None, 0]
    packed, padded = (cells[f"row of 64, {way}, 1"] for way in reproducible.PACKED)
    assert packed["shape"] == [1, 64]
    assert padded["shape"] == [5, 256]
    shown = capsys.readouterr().out
    assert all(f"| row of 64 | {way} |" in shown for way in reproducible.PACKED)


@pytest.mark.skipif(not checkpointing.is_in_forward(), reason="train_fast beside checkpointing: 5.23")
def test_streamed_layers(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    assert reproducible.main([*GIVEN.split(), "--parts", "streamed", "--where", "half", "--out", str(file)]) == 0
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    assert [cell["way"] for cell in cells.values()] == ["eager", "replayed"] * 2
    assert len({*map(str, (cell["losses"] for cell in cells.values()))}) == 1
    assert [cell["apart"] for cell in cells.values()] == [None, 0, 0, 0]
    assert cells["32 streamed, replayed, 1"]["reasons"] == []


@pytest.mark.parametrize("way", [way for part in reproducible.PARTS.values() for way in part])
def test_only_some_ways_are_deterministic(way: str) -> None:
    filled = torch.utils.deterministic.fill_uninitialized_memory
    with reproducible.determinism(way):
        assert torch.are_deterministic_algorithms_enabled() == (way not in ("whole", "free", *reproducible.PACKED))
        filled_now = torch.utils.deterministic.fill_uninitialized_memory
        assert filled_now == (way not in ("unfilled", *reproducible.STREAMED, *reproducible.FUSED))
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory == filled


@pytest.mark.parametrize("row", [50, 2048, 8192])
def test_texts_fill_a_row(row: int) -> None:
    found = reproducible.lengths(row, 50, 500, random.Random(0))
    assert sum(found) == row
    assert min(found) >= 50
    assert max(found) <= 500


def test_texts_that_fill_no_row(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        reproducible.main(["--shape", "tiny", "--rows", "40"])
    assert "1 texts of 50 to 500 tokens do not fill a row of 40" in capsys.readouterr().err


def test_packed_and_padded_batches_hold_the_same_texts() -> None:
    texts = [list(torch.arange(1, 9).split([3, 5])), list(torch.arange(1, 9).split([6, 2]))]
    for row, batch in zip(reproducible.packed(texts), reproducible.padded(texts), strict=True):
        mask = batch["attention_mask"].bool()
        assert batch["input_ids"].shape == (2, reproducible.MULTIPLE)
        assert batch["input_ids"][mask].equal(row["input_ids"][0])
        assert batch["labels"][:, 1:][mask[:, 1:]].equal(row["labels"][row["labels"] != -100])
        assert (batch["labels"][~mask] == -100).all()


def cell(way: str, losses: list[str], **more: Any) -> dict[str, Any]:
    return {"case": "32", "way": way, "losses": losses, "replayed": 1, "apart": None, **more}


@pytest.mark.parametrize(
    ("cells", "problem"),
    [
        ([cell("free", ["nan"])], "0: a loss is not finite"),
        ([cell("padded", ["1.5"], replayed=0)], "0: nothing was replayed"),
        ([cell("filled", ["1.5"]), cell("filled", ["1.6"], apart=0.0)], "1: not what the first turn trained"),
        ([cell("unfilled", ["1.5"]), cell("unfilled", ["1.5"], apart=0.1)], "1: not what the first turn trained"),
        ([cell("eager", ["1.5"]), cell("replayed", ["1.5"], apart=0.1)], "1: not what the first turn trained"),
        ([cell("replayed", ["1.5"], replayed=0)], "0: nothing was replayed"),
        ([cell("packed", ["1.5"]), cell("padded", ["1.6"])], "32: a first loss of 1.5 packed, and of 1.6 padded"),
    ],
)
def test_problems(cells: list[dict[str, Any]], problem: str) -> None:
    assert [*reproducible.problems({str(number): one for number, one in enumerate(cells)})] == [problem]


def test_no_problems() -> None:
    """With PyTorch's attention two turns may differ."""
    cells = [cell("whole", ["1.5"]), cell("whole", ["1.6"], apart=0.1), cell("filled", ["1.5"], apart=0.0)]
    assert [*reproducible.problems({str(number): one for number, one in enumerate(cells)})] == []


@pytest.mark.skipif(not checkpointing.is_in_forward(), reason="train_fast beside checkpointing: 5.23")
def test_fused_layers(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    given = GIVEN.replace("--steps 1", "--steps 1 --turns 1")
    assert reproducible.main([*given.split(), "--parts", "fused", "--kernels", "--out", str(file)]) == 1
    result = json.loads(file.read_text(encoding="utf-8"))
    assert [cell["apart"] for cell in result["cells"].values()] == [None, None, 0]  # pytorch, unfused, fused
    assert result["problems"] == ["32 fused, fused, 1: ('there are no kernels for cpu',)"]  # it has to say so
    assert {name: one["moved"] for name, one in result["kernels"].items()} == {"32 pytorch": [], "32 fused": []}
