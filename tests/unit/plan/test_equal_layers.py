"""Steps with some layers of each kind take what steps with all layers take, to the byte."""

from __future__ import annotations

from typing import Any

import pytest

from gemma4_compat._gemma4.models import build
from gemma4_compat._lab import tiny_configs
from gemma4_compat._plan import equal_layers, switches, training, training_step
from gemma4_compat._plan.training_step import Step, StepMemory

#: Steps that differ in what layers keep and read, and a variant for each.
STEPS: list[tuple[str, dict[str, Any]]] = [
    ("E2B", {"train_fast": True}),
    ("26B-A4B", {"train_fast": True, "padding": False}),
    ("E2B", {"gradient_checkpointing": False, "chunked_loss": True}),
    ("31B", {"max_length": 2304, "chunked_loss": True, "chunked_mlp": True}),
    ("E2B", {"activation_offloading": True}),
]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each run of a step leaves out."""
    found: list[int] = []
    holds = equal_layers.Tally.holds

    def noted(self: equal_layers.Tally) -> bool:
        found.append(len(self.skipped))
        return holds(self)

    monkeypatch.setattr(equal_layers.Tally, "holds", noted)
    return found


def measured(variant: str, **step: Any) -> StepMemory:
    config = tiny_configs.config(18, text_variant=variant)
    given = Step(**{"max_length": 64, "r": 2, **step})
    return training_step.measure(build.on_meta(config)[0], (), given)


@pytest.mark.parametrize(("variant", "step"), STEPS)
def test_a_step_with_some_layers_of_each_kind(
    monkeypatch: pytest.MonkeyPatch, runs: list[int], variant: str, step: dict[str, Any]
) -> None:
    if step.get("activation_offloading") and not training_step.can_offload():
        pytest.skip("since 5.17 transformers offloads")
    found = measured(variant, **step)
    with monkeypatch.context() as patched:
        patched.setattr(equal_layers, "_kind", id)
        assert found == measured(variant, **step)
    few, every = runs
    assert few >= 6
    assert every == 0


@pytest.mark.parametrize("place", [1, 13])  # sliding layers are 0, 1, 3, 4, ... 13, 15, and one of another kind
def test_layers_that_only_seem_to_be_equal_all_run(
    monkeypatch: pytest.MonkeyPatch, runs: list[int], place: int
) -> None:
    """One of those that others are counted like keeps something more."""
    import torch

    kept: list[Any] = []
    upstream = equal_layers._watched

    def watched(layer: Any, position: int, tally: equal_layers.Tally) -> Any:
        if position == place:
            layer.register_forward_hook(lambda *_: kept.append(torch.empty(1 << 20)))
        return upstream(layer, position, tally)

    monkeypatch.setattr(equal_layers, "_watched", watched)
    found = measured("26B-A4B")
    assert runs[0] > 0
    assert runs[1:] == [0]
    assert kept
    monkeypatch.undo()
    assert measured("26B-A4B").forward < found.forward


def test_a_plan_runs_no_step_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs do not depend on the loss, and passes not on graphs."""
    ran: list[Step] = []

    def measure(step: Step) -> StepMemory:
        ran.append(step)
        graphs = training_step.Kept(pool=7 if step.gradient_checkpointing else 5, captured=1)
        backward = 2000 if step.chunked_loss else 3000
        plain = training_step.NO_GRAPHS
        return StepMemory(
            adapter=0, optimizer=0, forward=0, backward=backward, sizes=(), graphs=graphs if step.train_fast else plain
        )

    first = Step(max_length=64)
    found = training._measured(measure, first, replayed=True)
    for loss in (False, True):
        for fast in (False, True):
            for checkpointing in (True, False):
                step = Step(max_length=64, chunked_loss=loss, train_fast=fast, gradient_checkpointing=checkpointing)
                assert found(step) == measure(step)
                ran.pop()
    passes = [(step.gradient_checkpointing, step.chunked_loss) for step in ran]
    assert passes.count((True, False)) == passes.count((True, True)) == 1
    assert switches.unsupported_reason(Step(max_length=4096), "train_fast")
    long = training._measured(measure, Step(max_length=4096), replayed=True)
    assert long(Step(max_length=4096)).graphs == training_step.NO_GRAPHS
