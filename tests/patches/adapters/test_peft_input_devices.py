"""peft-input-devices: an adapter on a module whose input comes from another device.

Trained, saved, loaded and merged on two devices: tests/unit/gemma4/adapters/test_tuners_on_two_devices.py.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest

from gemma4_compat.patches.adapters import peft_input_devices
from gemma4_compat.patches.adapters.peft_input_devices import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"RuntimeError: Expected all tensors to be on the same device"


def on(device: str, module: Any) -> Any:
    """``module`` with a hook that says so; nothing is moved."""
    module._hf_hook = SimpleNamespace(execution_device=device)
    return module


def adapted(model: Any, targets: list[str], **options: Any) -> Any:
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, **options))


def entrances(model: Any) -> list[str]:
    """The names of the layers that bring their inputs to their device."""
    return [
        name
        for name, module in model.named_modules()
        if peft_input_devices._bring_inputs in module._forward_pre_hooks.values()
    ]


@pytest.fixture
def model() -> Any:
    """Two layers on the CPU, a head on another device, and a norm on a third."""
    torch = pytest.importorskip("torch")
    layers = [torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()) for _ in range(2)]
    model = torch.nn.Sequential(*layers, torch.nn.LayerNorm(2), torch.nn.Linear(2, 2, bias=False))
    for layer in layers:
        on("cpu", layer)
        on("cpu", layer[0])
    on("meta", model[2])
    on("cpu", model[3])
    return on("cpu", model)


def test_only_what_is_the_first_on_its_device_brings_its_input_there(model: Any) -> None:
    tuned = adapted(model, ["0.0", "1.0", "3"])
    assert [name for name, module in tuned.named_modules() if hasattr(module, "lora_A")] == [
        "base_model.model.0.0",
        "base_model.model.1.0",
        "base_model.model.3",
    ]
    assert entrances(tuned) == ["base_model.model.3"]
    tuned.add_adapter("second", copy.deepcopy(tuned.peft_config["default"]))
    assert entrances(copy.deepcopy(tuned)) == ["base_model.model.3"]
    assert len(tuned.base_model.model[3]._forward_pre_hooks) == 1


def test_a_layer_with_several_devices_in_it_is_no_such_layer(model: Any) -> None:
    on("meta", model[1][1])
    assert entrances(adapted(model, ["0.0", "1.0"])) == ["base_model.model.1.0"]


@pytest.mark.parametrize("hooked", [False, True])
def test_on_one_device_there_is_no_hook(model: Any, hooked: bool) -> None:
    for module in model.modules():
        if hooked:
            on("cpu", module)
        else:
            vars(module).pop("_hf_hook", None)
    assert entrances(adapted(model, ["0.0", "1.0", "3"])) == []


def test_an_offloaded_model_computes_on_one_device(workspace: Any) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["lm_head", "q_proj"], trainable_token_indices=[3, 4])
    assert entrances(get_peft_model(workspace.split(offload="both"), config)) == []


def test_inputs_are_on_the_device_of_the_base_layer_or_stay(model: Any) -> None:
    import torch

    layer = adapted(model, ["3"]).base_model.model[3]
    x, other = torch.ones(1, 2), {"weights": torch.ones(2), "names": ["default"]}
    args, kwargs = peft_input_devices._bring_inputs(layer, (x,), other)
    assert args[0] is x
    on("meta", layer.base_layer)
    args, kwargs = peft_input_devices._bring_inputs(layer, (x,), other)
    assert (args[0].device.type, kwargs["weights"].device.type, kwargs["names"]) == ("meta", "meta", ["default"])
    del layer.base_layer._hf_hook
    assert peft_input_devices._bring_inputs(layer, (x,), other) is None


def test_such_a_layer_can_be_compiled(model: Any) -> None:
    import torch

    tuned = adapted(model, ["3"], init_lora_weights=False)
    x = torch.ones(1, 2)
    expected = tuned(x)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(tuned, backend="eager")(x), expected)


def test_a_copy_for_a_tied_weight_gets_a_hook_and_keeps_its_weight(model: Any) -> None:
    import torch

    weight = torch.nn.Linear(2, 2).weight
    tied, hooked = torch.nn.Linear(2, 2, bias=False), on("cpu", torch.nn.Linear(2, 2))
    tied.weight = weight
    wrapper = SimpleNamespace(original_module=model[3], modules_to_save={"tied": tied, "hooked": hooked})
    before = hooked._hf_hook
    peft_input_devices._hook_copies(wrapper)
    assert tied.weight is weight
    assert str(tied._hf_hook.execution_device) == "cpu"
    assert hooked._hf_hook is before
