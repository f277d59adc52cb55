"""benchmarks/training/long_steps.py: ways with the bits of the way before have them; what fits is decided by peaks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")
from benchmarks.training import long_steps
from gemma4_compat._plan import training_step
from tests.helpers import without


def test_a_run_and_its_plan(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    given = (
        f"--shape tiny --sequences 32 --ways mlp,pieces,windows --bits 32 --tokens 8 --rank 2 --steps 1 --json {file}"
    )
    assert long_steps.main(given.split()) == 0
    assert long_steps.main(["--plan", str(file)]) == 0
    result = json.loads(file.read_text(encoding="utf-8"))
    assert result["bits"]["pieces"]["loss_equal"]
    assert result["bits"]["pieces"]["gradients_equal"] == result["bits"]["pieces"]["gradients"] > 0
    assert result["bits"]["again"]["apart"] == 0
    mlp, pieces, windows = (result["cells"][f"32 {way}"] for way in ("mlp", "pieces", "windows"))
    assert mlp["losses"] == pieces["losses"]
    assert "planned_gib" not in mlp
    assert pieces["planned_gib"] == windows["planned_gib"] > 0  # 32 tokens have no windows
    assert result["fits"] == {}  # a CPU's memory is not measured


@pytest.mark.skipif(not training_step.can_offload(), reason="since 5.17 transformers offloads")
def test_only_ways_with_that_switch_offload(workspace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without the patch that makes the method read its keyword arguments."""
    import torch

    asked: list[int] = []

    class Recorded(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, **_: Any) -> None:
            super().__init__(lambda one: one, lambda one: one)
            asked.append(1)

    monkeypatch.setattr("transformers.modeling_utils.save_on_cpu", Recorded)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(long_steps.device, "main_device", lambda: torch.device("cpu"))
    steps = long_steps.Steps(workspace.load().requires_grad_(False), rank=2, tokens=8)
    with without("transformers-checkpointing-options"):
        for name, way in long_steps.WAYS.items():
            asked.clear()
            steps.bits(way, 16)
            assert bool(asked) == (name in ("offload", "all")), name


def test_a_budget_between_tensors_and_reserved_memory_needs_a_ballast(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    class Steps:
        def measured(self, *_: Any, **__: Any) -> dict[str, Any]:
            memory = {"peak_gib": 7.0, "peak_reserved_gib": 9.0}
            return {"first_s": 1.0, "seconds": [1.0], "tokens_per_second": 1.0, "memory": memory, "losses": ["2.5"]}

        def fits(self, _way: Any, _sequence: int, budget: float) -> bool:
            asked.append(budget)
            return True

    monkeypatch.setattr(long_steps.Run, "keep", lambda *_: None)
    arguments = long_steps.argparse.Namespace(
        seconds=60, shape="tiny", where="gpu", rank=2, budget=[6, 8, 12], steps=1, out=None, ways=["pieces"]
    )
    run = long_steps.Run(arguments)
    run.measure(Steps(), 16, "pieces")  # type: ignore[arg-type]
    assert asked == [8]
    assert {budget: found["fits"] for budget, found in run.result["fits"]["16 pieces"].items()} == {
        "6": False,
        "8": True,
        "12": True,
    }
