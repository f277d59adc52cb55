"""A model is built once for all steps of a training plan: no step leaves anything in it for the next one."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from gemma4_compat._gemma4.models import build  # noqa: E402
from gemma4_compat._gemma4.quantization import config  # noqa: E402
from gemma4_compat._lab import tiny_configs  # noqa: E402
from gemma4_compat._plan import fake_model, training_step  # noqa: E402
from gemma4_compat._plan.training_step import Step, StepMemory  # noqa: E402

GIVEN = {"max_length": 96, "r": 2}
STEPS: tuple[dict[str, Any], ...] = (
    {"chunked_loss": True, "chunked_mlp": True},
    {"train_fast": True},
    {"gradient_checkpointing": False},
    {"activation_offloading": True},
    {},
)


def steps(variant: str) -> training_step.Steps:
    model = build.on_meta(tiny_configs.config(6, text_variant=variant))[0]
    names = config.linear_names(model, config.default_skip_modules(model))
    return training_step.Steps(model, names, 2, quantized_experts=variant == "26B-A4B")


@pytest.mark.full
@pytest.mark.parametrize("variant", ["E2B", "26B-A4B"])
def test_a_step_takes_the_same_after_others(variant: str) -> None:
    given = [
        Step(**GIVEN, **one) for one in STEPS if training_step.can_offload() or "activation_offloading" not in one
    ]
    shared = steps(variant)
    found = [shared.measure(one) for one in (*given, given[0])]
    alone: list[StepMemory] = [steps(variant).measure(one) for one in given]
    assert found == [*alone, alone[0]]
    assert len({one.peak for one in alone}) > 2


def state(model: Any) -> dict[str, dict[str, Any]]:
    return {
        name: {key: copy.copy(value) if isinstance(value, dict) else value for key, value in vars(module).items()}
        for name, module in model.named_modules()
    }


def test_what_a_step_changes_is_put_back() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())
    model[0].known = {"a": 1}
    before, found = state(model), model(torch.ones(1, 2))

    def change() -> None:
        model[0].forward = functools.partial(torch.mul, 2)
        model[0].known["b"] = 2
        model[0].register_forward_hook(lambda *_: torch.zeros(1, 2))
        model[1], model.mark = torch.nn.Sigmoid(), True
        del model[0].weight
        raise RuntimeError("over")

    with pytest.raises(RuntimeError, match="over"), fake_model.put_back(model):
        change()
    assert state(model) == before
    assert torch.equal(model(torch.ones(1, 2)), found)
    with fake_model.put_back(model):
        model(torch.ones(1, 2)).sum().backward()
    assert [one.grad for one in model.parameters()] == [None, None]
