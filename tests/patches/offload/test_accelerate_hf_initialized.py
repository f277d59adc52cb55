"""F1: quantized parameters move although transformers marked them."""

from __future__ import annotations

from typing import Any

import pytest

from gemma4_compat.patches.offload.accelerate_hf_initialized import MARK, PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = (
        r"TypeError: Params4bit.__new__\(\) got an unexpected keyword argument '_is_hf_initialized'"
        r"|_is_hf_initialized is lost"  # bitsandbytes 0.50 and later swallow the keyword
    )
    exact = False


@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_the_mark_is_on_the_new_parameter_and_still_on_the_old_one(workspace: Any, quantization: str) -> None:
    from accelerate.utils import set_module_tensor_to_device

    model = workspace.load(quantization)
    layer = model.model.language_model.layers[0].mlp.up_proj
    old = layer.weight
    assert getattr(old, MARK)
    set_module_tensor_to_device(model, "model.language_model.layers.0.mlp.up_proj.weight", "meta")
    assert layer.weight is not old
    assert layer.weight.device.type == "meta"
    assert getattr(layer.weight, MARK)
    if PATCH.id in _applied():  # newer accelerate takes it off the old one and leaves it off
        assert getattr(old, MARK)


def test_a_move_that_fails_leaves_the_parameter_as_it_was(workspace: Any) -> None:
    import torch
    from accelerate.utils import set_module_tensor_to_device

    layer = workspace.load("4bit").model.language_model.layers[0].mlp.up_proj
    old = layer.weight
    with pytest.raises(RuntimeError):
        set_module_tensor_to_device(layer, "weight", "no-such-device", value=torch.zeros(1))
    assert layer.weight is old
    assert getattr(old, MARK)


def _applied() -> set[str]:
    import gemma4_compat

    return {
        name for name, status in gemma4_compat.status().items() if status.state is gemma4_compat.PatchState.APPLIED
    }
