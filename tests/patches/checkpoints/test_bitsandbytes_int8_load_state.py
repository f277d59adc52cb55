"""bitsandbytes-int8-load-state: a state dict is loaded into an 8-bit model that has computed something."""

from __future__ import annotations

from typing import Any

import pytest

from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.checkpoints.bitsandbytes_int8_load_state import PATCH
from tests.helpers import without
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = "Loading a quantized checkpoint into non-quantized Linear8bitLt is not supported"


def other_weights(state: dict[str, Any]) -> dict[str, Any]:
    """Other scales, and other rows of the 8-bit weights."""
    return {
        name: value * 1.5
        if name.endswith("SCB")
        else value.flip(0)
        if value.dtype.itemsize == 1 and value.dim()
        else value
        for name, value in state.items()
    }


@pytest.mark.parametrize("place", ["one device", "split"])
@pytest.mark.parametrize("gradients", [False, True])
def test_other_weights_are_loaded_after_a_forward(workspace: Any, place: str, gradients: bool) -> None:
    new = other_weights(workspace.load("8bit").state_dict())
    reference = workspace.load("8bit")
    reference.load_state_dict(new)
    model = workspace.load("8bit") if place == "one device" else workspace.split("8bit")
    if gradients:
        model(**workspace.inputs()).logits.float().sum().backward()
    before = workspace.outputs(model)
    model.load_state_dict(new)
    assert difference(workspace.outputs(reference), workspace.outputs(model)) == 0.0
    assert difference(before, workspace.outputs(model)) > 0.0
    found = model.state_dict()
    assert all((found[name] == value).all() for name, value in new.items() if not found[name].is_meta)


def test_what_is_not_quantized_yet_is_refused_as_before(workspace: Any) -> None:
    import bitsandbytes
    import torch

    layer = bitsandbytes.nn.Linear8bitLt(4, 4, has_fp16_weights=False)
    state = {**layer.state_dict(), "SCB": torch.ones(4)}
    with pytest.raises(RuntimeError, match="non-quantized Linear8bitLt is not supported"):
        layer.load_state_dict(state)
    with without(PATCH.id), pytest.raises(RuntimeError, match="non-quantized Linear8bitLt is not supported"):
        layer.load_state_dict(state)
