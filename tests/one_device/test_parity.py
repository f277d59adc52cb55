"""The oracle: the same weights give the same answer wherever they live, bit for bit, adapters and training
included.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from gemma4_compat._lab import tiny
from gemma4_compat._lab.workspace import difference
from tests.conftest import census
from tests.helpers import pairwise

QUANTIZATIONS = [None, "4bit", "4bit-double", "8bit"]
FACTORS = (QUANTIZATIONS, ["layers", "towers", "both"], [None, "language", "all"])
#: Cells of the fast suite.
FAST = pairwise(*FACTORS)


@pytest.mark.parametrize("wrong", [0, 1, 2])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 7.0])
def test_the_oracle_sees_a_wrong_value_in_any_forward(wrong: int, value: float) -> None:
    import torch

    from gemma4_compat._lab.workspace import Outputs

    tokens = torch.tensor([[1, 2, 3]])
    right = Outputs(tuple(torch.zeros(1, 2, 4) for _ in range(3)), tokens)
    logits = [torch.zeros(1, 2, 4) for _ in range(3)]
    logits[wrong][0, 1, 2] = value
    assert difference(right, right) == 0.0
    assert difference(right, Outputs(tuple(logits), tokens)) == (7.0 if value == 7.0 else float("inf"))
    assert difference(right, Outputs(right.logits, tokens + 1)) == float("inf")


@pytest.mark.parametrize(
    "quantization, offload, adapter",
    [pytest.param(*cell, marks=() if cell in FAST else pytest.mark.full) for cell in itertools.product(*FACTORS)],
)
def test_three_forwards_and_generate_are_bit_exact(
    workspace: Any, one_device: Callable[..., Any], quantization: str | None, offload: str, adapter: str | None
) -> None:
    from peft import PeftModel

    model = workspace.split(quantization, offload)
    asked = dict(model.hf_device_map)
    on_meta = {name for name, parameter in model.named_parameters() if parameter.device.type == "meta"}
    assert on_meta, "nothing is offloaded: the test would show nothing"
    if adapter is not None:
        model = PeftModel.from_pretrained(model, workspace.adapter(adapter))
    assert difference(one_device(quantization, adapter), workspace.outputs(model)) == 0.0
    assert model.hf_device_map == asked
    still = {
        name.removeprefix("base_model.model.").replace(".base_layer", "")
        for name, parameter in model.named_parameters()
        if parameter.device.type == "meta"
    }
    assert still == on_meta


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_training_step_gives_the_loss_and_gradients_of_one_device(
    workspace: Any, quantization: str | None, checkpointing: bool
) -> None:
    import torch

    loss, gradients = _training_step(workspace, workspace.load(quantization), checkpointing)
    split_loss, split_gradients = _training_step(workspace, workspace.split(quantization), checkpointing)
    assert split_loss == loss
    assert gradients.keys() == split_gradients.keys()
    different = [name for name in gradients if not torch.equal(gradients[name], split_gradients[name])]
    assert not different
    without = [name for name, gradient in gradients.items() if not gradient.any()]
    assert not without, "a gradient that is zero on one device too shows nothing"


def _training_step(workspace: Any, base: Any, checkpointing: bool) -> tuple[float, dict[str, Any]]:
    from peft import PeftModel

    model = PeftModel.from_pretrained(base, workspace.adapter("all"), is_trainable=True).train()
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    batch = tiny.inputs(workspace.main)
    loss = model(**batch, labels=batch["input_ids"]).loss
    loss.backward()
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    # Keys and values of the KV-shared layers are never computed, so their projections have no gradient anywhere.
    return loss.item(), {name: p.grad.cpu() for name, p in trainable.items() if p.grad is not None}


@pytest.mark.parametrize("quantization", ["4bit", "4bit-double", "8bit"])
def test_ten_forwards_leave_no_tensor_behind(workspace: Any, quantization: str) -> None:
    import torch
    from peft import PeftModel

    model = PeftModel.from_pretrained(workspace.split(quantization), workspace.adapter("all"))
    batch = tiny.inputs(workspace.main)
    with torch.no_grad():
        for _ in range(2):  # caches fill
            model(**batch)
        before = census()
        for _ in range(10):
            model(**batch)
    assert census() == before
