"""F4: tuners on quantized bases: those that can run do, the others are refused and leave no trace."""

from __future__ import annotations

from typing import Any

import pytest

from gemma4_compat._lab import tiny_adapters
from gemma4_compat.patches.adapters.peft_quantized_tuners import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"Input type|same dtype|mat1 and mat2 shapes|gives different outputs"


@pytest.mark.parametrize("quantization", ["4bit", "4bit-double"])
def test_the_trial_leaves_the_base_as_it_is(workspace: Any, quantization: str) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    model = workspace.load(quantization)
    before = {
        name: (module.weight.data.clone(), dict(vars(module.weight.quant_state)), module.training)
        for name, module in model.named_modules()
        if type(module).__name__ == "Linear4bit"
    }
    get_peft_model(model, LoraConfig(r=4, target_modules=tiny_adapters.TARGETS["language"]))
    now = {name.removesuffix(".base_layer"): module for name, module in model.named_modules()}
    assert len(before) > 30
    for name, (data, state, training) in before.items():
        layer = now[name]  # the base layer, which comes after the one around it
        assert type(layer).__name__ == "Linear4bit"
        assert layer.training is training
        assert torch.equal(layer.weight.data, data)
        found = vars(layer.weight.quant_state)
        assert found.keys() == state.keys()
        assert all(found[key] is state[key] for key in state)


@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_the_trial_leaves_a_base_that_has_not_run_as_it_is(workspace: Any, quantization: str) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    model = workspace.load(quantization)
    layers = {name: module for name, module in model.named_modules() if type(module).__name__.startswith("Linear")}
    layers = {name: module for name, module in layers.items() if type(module) is not torch.nn.Linear}
    for layer in layers.values():
        if quantization == "4bit":  # as after a merge: bitsandbytes before 0.50 takes the dtype of an input
            layer.weight.quant_state.dtype = torch.float32
    before = {name: _attributes(layer) for name, layer in layers.items()}
    get_peft_model(model, LoraConfig(r=4, target_modules=tiny_adapters.TARGETS["language"]))
    assert len(before) > 30
    for name, layer in layers.items():
        assert _attributes(layer) == before[name]


def _attributes(layer: Any) -> list[tuple[str, Any]]:
    """Of the layer, its weight and their states; tensors by their identity."""
    weight = layer.weight
    parts = [layer, weight, vars(layer).get("state"), vars(weight).get("quant_state")]
    return [
        (name, value if isinstance(value, (bool, int, str, float)) or "dtype" in name else id(value))
        for part in parts
        if part is not None
        for name, value in vars(part).items()
    ]
