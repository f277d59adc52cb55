"""benchmarks/training/grpo_steps.py: whole steps in turns, upstream and replayed; what fits is decided by peaks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")
import gemma4_compat
from benchmarks.training import grpo_steps
from gemma4_compat._graphs import recording
from gemma4_compat._lab.stand_ins import tape
from tools.pages import measurements


def options(file: Path, more: str = "") -> list[str]:
    return f"--shape tiny-E2B --tokens 6 --rounds 1 --exact --json {file} {more}".split()


def test_a_run_and_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU a stand-in captures."""
    applied: list[tuple[bool, bool]] = []
    generate = grpo_steps.rollouts.generate

    def noted(model: Any, ids: Any, **given: Any) -> Any:
        before = gemma4_compat.statistics(model).decoding.replayed
        is_on = any(status.state == "applied" for status in gemma4_compat.status().values())
        drawn = generate(model, ids, **given)
        applied.append((is_on, gemma4_compat.statistics(model).decoding.replayed > before))
        return drawn

    monkeypatch.setattr(grpo_steps.rollouts, "generate", noted)
    folder = tmp_path / "benchmarks" / "results" / "2026-01-01-cpu"
    with tape.standing_in(recording.RECORDERS):
        assert grpo_steps.main(options(folder / "grpo_steps-tiny.json")) == 0
    result = json.loads((folder / "grpo_steps-tiny.json").read_text(encoding="utf-8"))
    (first,) = result["rounds"]
    assert first["upstream"]["steps"]["replayed"] == 0
    assert first["replayed"]["steps"] == {"replayed": 5, "captured": 0, "fused": 0, "prompts_replayed": 1}
    assert all(one["finite"] and one["rollout"]["seconds"] > 0 for one in first.values())
    assert [found["tokens"] for found in result["log_probabilities"].values()] == [48, 48]
    assert all(0 < found["mean"] <= found["largest"] < 1 for found in result["log_probabilities"].values())
    assert result["fits"] == {}  # a CPU's memory is not measured
    assert applied[:2] == [(True, False), (False, False)]  # the first is not measured
    assert set(applied[2:]) == {(True, True), (False, False)}
    monkeypatch.setattr(measurements, "ROOT", tmp_path)
    assert "| tiny-E2B, float32 | replayed, `exact=True` |" in measurements.grpo_steps_section()


def test_without_a_run_the_page_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "ROOT", tmp_path)
    assert measurements.grpo_steps_section().startswith("No GPU has run")


def test_a_budget_between_tensors_and_reserved_memory_needs_a_ballast(monkeypatch: pytest.MonkeyPatch) -> None:
    """There a step fits that neither runs out of memory nor gives up replaying."""
    import torch

    run = stubbed(monkeypatch, [6, 8, 12])
    peaks = {"peak_gib": 7.0, "peak_reserved_gib": 9.0}
    run.result["summary"] = {"ways": {"upstream": peaks, "replayed": peaks}}
    monkeypatch.setattr(run, "whole", lambda _way: {"steps": {"replayed": 0}})
    for way in grpo_steps.WAYS:
        for budget in run.arguments.budget:
            run.decide(way, budget, 0.0)
    decided = {way: [one["fits"] for one in found.values()] for way, found in run.result["fits"].items()}
    assert decided == {"upstream": [False, True, True], "replayed": [False, False, True]}
    assert [one["by"] for one in run.result["fits"]["replayed"].values()] == ["peaks", "ballast", "peaks"]

    def without_room(_way: str) -> Any:
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(run, "whole", without_room)
    run.decide("upstream", 8, 0.0)
    assert run.result["fits"]["upstream"]["8"]["fits"] is False


def test_what_would_end_too_late_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    run = stubbed(monkeypatch, [8], seconds=-1)
    run.all()
    assert run.result["not_run"] == [
        "round 0, upstream",
        "round 0, replayed",
        "log-probabilities, upstream",
        "log-probabilities, replayed",
    ]
    assert run.result["rounds"] == []
    assert run.result["problems"] == []


@pytest.mark.parametrize(
    ("changed", "text"),
    [({"finite": False}, "a number is not finite"), ({"steps": {"replayed": 0}}, "nothing was replayed")],
)
def test_a_step_that_went_wrong_is_named(changed: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpo_steps.device, "main_device", lambda: 0)
    right = {"finite": True, "steps": {"replayed": 5}}
    assert grpo_steps.wrong("replayed", right) == []
    assert grpo_steps.wrong("replayed", right | changed) == [f"replayed: {text}"]


def stubbed(monkeypatch: pytest.MonkeyPatch, budget: list[float], *, seconds: float = 60) -> grpo_steps.Run:
    """A run without a model."""
    arguments = grpo_steps.argparse.Namespace(
        **{"shape": "tiny", "where": "gpu", "adapter": "float32", "exact": False, "tokens": 6, "rounds": 1},
        **{"budget": budget, "seconds": seconds, "out": None},
    )
    run = grpo_steps.Run(arguments)
    run.optimizer = run  # type: ignore[assignment]
    monkeypatch.setattr(run, "zero_grad", lambda: None, raising=False)
    return run
