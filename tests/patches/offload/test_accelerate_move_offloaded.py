"""A model with offloaded modules comes whole to the CPU, and refuses other moves, through any module around it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from gemma4_compat import Gemma4CompatError
from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.offload.accelerate_move_offloaded import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"NotImplementedError: Cannot copy out of meta tensor"


def held(model: Any) -> Any:
    import torch

    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

    return Holder()


@pytest.mark.parametrize("move", ["elsewhere", "to_empty"])
def test_whatever_holds_the_model_cannot_move_it(workspace: Any, move: str) -> None:
    holder = held(workspace.split())

    def asked() -> None:
        if move == "to_empty":
            holder.to_empty(device="cpu")
        else:  # stands for a GPU: values are copied, and not to the CPU
            holder._apply(lambda value: value.to("cpu").to("meta"))

    with pytest.raises(Gemma4CompatError, match=r"You can't move a model .*'model\.\S+' the first.* model\.cpu\(\)"):
        asked()
    with pytest.raises(NotImplementedError):  # what upstream raises
        asked()


@pytest.mark.parametrize(
    "quantization, adapter, move",
    [
        (None, None, "cpu"),
        (None, "all", "to"),
        ("4bit", "language", "cpu"),
        ("8bit", None, "cpu"),
        (None, None, "held"),
    ],
)
def test_a_move_to_the_cpu_ends_the_dispatch(
    workspace: Any, one_device: Callable[..., Any], quantization: str | None, adapter: str | None, move: str
) -> None:
    from peft import PeftModel

    base = workspace.split(quantization)
    model = base if adapter is None else PeftModel.from_pretrained(base, workspace.adapter(adapter))
    if move == "held":
        held(model).to("cpu")
    else:
        assert (model.cpu() if move == "cpu" else model.to(device="cpu")) is model
    assert {weight.device.type for weight in model.parameters()} == {"cpu"}
    assert not any(hasattr(module, "_hf_hook") for module in base.modules())
    assert "hf_device_map" not in vars(base)
    assert difference(one_device(quantization, adapter), workspace.outputs(model)) == 0.0
    model.cpu()


def test_the_guard_of_a_copy_is_its_own(workspace: Any) -> None:
    import torch

    model = workspace.split()
    copied = copy.deepcopy(model)
    copied.half()
    assert {parameter.dtype for parameter in copied.parameters()} == {torch.float16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_the_guard_goes_when_nothing_is_offloaded_any_more(workspace: Any) -> None:
    from accelerate.hooks import remove_hook_from_submodules

    model = workspace.split()
    assert "_apply" in vars(model)
    remove_hook_from_submodules(model)
    model.to("cpu")
    assert "_apply" not in vars(model)
    assert "_apply" not in vars(workspace.load())
