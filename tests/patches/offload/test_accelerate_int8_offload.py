"""F28: offloaded 8-bit layers answer, train and leave the device as 4-bit ones do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._lab import tiny, tiny_adapters
from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.offload.accelerate_int8_offload import PATCH
from tests.conftest import census
from tests.patches.adapters.test_peft_keep_dispatch import assert_same_everywhere, placement
from tests.patches.placement.splits import split
from tests.patches.promise import Promise

NAME = "model.language_model.layers.0.mlp.up_proj"


class TestPromise(Promise):
    patch_id = PATCH.id
    original = (
        r"RuntimeError: Cannot access accelerator device when none is available"
        r"|RuntimeError: No CUDA GPUs are available"  # the same, of a torch built for CUDA
        r"|RuntimeError: Cannot re-initialize CUDA in forked subprocess"  # of 2.15, in a fork
        r"|AttributeError: 'NoneType' object has no attribute 'unsqueeze'"
    )


def eight_bit(model: Any) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if type(module).__name__ == "Linear8bitLt"}


def test_a_forward_before_the_dispatch_changes_nothing_and_keeps_nothing(
    workspace: Any, one_device: Callable[..., Any]
) -> None:
    model = workspace.load("8bit")
    workspace.outputs(model)
    # Transformers 5.5.1 and older have projections in KV-shared layers that nothing calls.
    taken = {name for name, layer in eight_bit(model).items() if layer.state.CB is not None}
    model = workspace.dispatch(model)
    offloaded = [name for name, layer in eight_bit(model).items() if layer.weight.device.type == "meta"]
    assert taken.intersection(offloaded)
    assert all(eight_bit(model)[name].state.CB is None for name in offloaded)
    assert difference(one_device("8bit", None), workspace.outputs(model)) == 0.0


@pytest.mark.parametrize("training", [False, True])
def test_after_a_forward_no_offloaded_layer_holds_a_weight(workspace: Any, training: bool) -> None:
    import torch

    model = workspace.split("8bit").train(training)
    with torch.no_grad():
        model(**tiny.inputs(workspace.main))
    for layer in eight_bit(model).values():
        if layer.weight.device.type == "meta":
            held = {name: value for name, value in vars(layer.state).items() if isinstance(value, torch.Tensor)}
            assert not held
            assert layer.weight.CB is None or layer.weight.CB.device.type == "meta"


@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_with_and_without_outlier_columns(workspace: Any, one_device: Callable[..., Any], threshold: float) -> None:
    models = workspace.load("8bit"), workspace.split("8bit")
    for model in models:
        for layer in eight_bit(model).values():
            assert layer.state.threshold == 6.0
            layer.state.threshold = threshold
    whole, split = (workspace.outputs(model) for model in models)
    assert difference(whole, split) == 0.0
    if threshold:
        assert difference(whole, one_device("8bit", None)) > 0.0, "no outliers: the test shows nothing"


def layers(device: Any, *, outputs: int = 96) -> Any:
    """Two 8-bit layers with a bias, of no particular model."""
    import torch
    from bitsandbytes.nn import Linear8bitLt

    torch.manual_seed(5)
    model = torch.nn.Sequential(
        Linear8bitLt(64, outputs, has_fp16_weights=False, threshold=6.0),
        torch.nn.LayerNorm(outputs),
        torch.nn.Linear(outputs, 64),
        Linear8bitLt(64, 32, has_fp16_weights=False, threshold=6.0),
    )
    for layer in (model[0], model[3]):
        layer.weight = layer.weight.to(device)  # quantizes, also from the CPU to the CPU
    return model.to(device).eval()


def outputs_and_gradient(model: Any, device: Any) -> list[Any]:
    import torch

    batch = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(1))
    found = []
    for _ in range(3):
        moved = batch.to(device).requires_grad_(True)
        output = model(moved)
        output.square().mean().backward()
        assert moved.grad is not None
        found += [output.detach().cpu(), moved.grad.cpu()]
    return found


@pytest.mark.parametrize("known_to_the_map", [True, False])
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
def test_layers_with_a_bias_of_any_model_and_a_map_without_scales(
    workspace: Any, tmp_path: Path, used: bool, known_to_the_map: bool
) -> None:
    import torch
    from accelerate import dispatch_model

    reference = outputs_and_gradient(layers(workspace.main), workspace.main)
    model = layers(workspace.main)
    if used:
        outputs_and_gradient(model, workspace.main)
    entries = {"0": workspace.offloaded, "1": workspace.main, "2": workspace.main, "3": workspace.offloaded}
    model = dispatch_model(model, entries, offload_dir=str(tmp_path))
    if not known_to_the_map:
        for layer in (model[0], model[3]):
            hook = layer._hf_hook
            hook.weights_map = {name: hook.weights_map[name] for name in ("weight", "bias")}
    assert model[0].weight.device.type == "meta"
    found = outputs_and_gradient(model, workspace.main)
    assert all(torch.equal(a, b) for a, b in zip(reference, found))
    with pytest.raises((RuntimeError, ValueError)):  # on the CPU and on a GPU
        model(torch.ones(1, 5, 32, device=workspace.main))  # too narrow: no hook takes the first layer's weight out
    assert model[0].weight.device.type != "meta"
    found = outputs_and_gradient(model, workspace.main)
    assert all(torch.equal(a, b) for a, b in zip(reference, found))
    assert model[0].weight.device.type == "meta"


def test_new_weights_set_on_a_layer_without_a_hook_bring_their_own_scales(workspace: Any) -> None:
    import torch
    from accelerate.utils import set_module_tensor_to_device

    reference, model = layers(workspace.main), layers(workspace.main)
    model[0].weight = model[0].weight.to("meta")
    statistics = reference[0].weight.SCB * 2
    set_module_tensor_to_device(
        model[0], "weight", workspace.main, value=reference[0].weight.data.cpu(), fp16_statistics=statistics.cpu()
    )
    assert torch.equal(model[0].weight.SCB, statistics)


def test_without_hooks_again_it_is_the_model_of_one_device(workspace: Any, one_device: Callable[..., Any]) -> None:
    from accelerate.hooks import remove_hook_from_submodules

    for used in (False, True):
        model = workspace.split("8bit")
        if used:
            workspace.outputs(model)
        remove_hook_from_submodules(model)
        assert not any(parameter.device.type == "meta" for parameter in model.parameters())
        for _ in range(2):
            assert difference(one_device("8bit", None), workspace.outputs(model)) == 0.0
            model.to(workspace.main)


def test_a_dispatch_of_a_dispatched_model(workspace: Any, one_device: Callable[..., Any]) -> None:
    from accelerate.hooks import remove_hook_from_submodules

    model = workspace.split("8bit", "layers")
    workspace.outputs(model)
    remove_hook_from_submodules(model)
    assert difference(one_device("8bit", None), workspace.outputs(workspace.dispatch(model, "both"))) == 0.0


def test_a_model_dispatched_before_the_patches_is_repaired(workspace: Any, one_device: Callable[..., Any]) -> None:
    # Without them all, older releases do not get as far as attaching hooks.
    gemma4_compat.revert(PATCH.id)
    gemma4_compat.revert("bitsandbytes-int8-meta-scales")
    try:
        model = workspace.split("8bit")
    finally:
        gemma4_compat.install()
    assert model.get_submodule(NAME).weight.SCB.device.type == "meta"
    assert difference(one_device("8bit", None), workspace.outputs(model)) == 0.0
    assert model.get_submodule(NAME).weight.SCB.device.type == "cpu"


def test_scales_that_nobody_kept_are_an_error_that_says_so(workspace: Any) -> None:
    gemma4_compat.revert("bitsandbytes-int8-meta-scales")
    try:
        model = workspace.split("8bit")
    finally:
        gemma4_compat.install()
    hook = model.get_submodule(NAME)._hf_hook
    hook.weights_map = {"weight": hook.weights_map["weight"]}
    with pytest.raises(gemma4_compat.Gemma4CompatError, match=r"8-bit weight .* were destroyed .* load the model"):
        workspace.outputs(model)


def test_adapters_come_and_go_as_on_one_device(workspace: Any) -> None:
    from peft import PeftModel

    outputs = []
    for base in (workspace.load("8bit"), workspace.split("8bit")):
        before = placement(base)
        model = PeftModel.from_pretrained(base, workspace.adapter("language"))
        model.load_adapter(str(workspace.adapter("all")), "second")
        seen = []
        for name in ("default", "second"):
            model.set_adapter(name)
            seen.append(workspace.outputs(model))
        with model.disable_adapter():
            seen.append(workspace.outputs(model))
        model.delete_adapter("second")
        model.load_adapter(str(workspace.adapter("towers")), "second")
        model.set_adapter("second")
        seen.append(workspace.outputs(model))
        assert placement(model) == before
        outputs.append(seen)
    whole, split = outputs
    assert [difference(a, b) for a, b in zip(whole, split)] == [0.0] * 4
    assert all(difference(whole[0], other) > 0.0 for other in whole[1:]), "the adapters must differ to show anything"


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_a_new_adapter_trains_as_on_one_device(workspace: Any, dora: bool) -> None:
    from peft import LoraConfig

    config = LoraConfig(r=2, target_modules=tiny_adapters.TARGETS["language"], use_dora=dora)
    assert_same_everywhere(workspace, config, "8bit")


def test_merge_and_unmerge_are_those_of_one_device(workspace: Any) -> None:
    from peft import PeftModel

    outputs = []
    for base in (workspace.load("8bit"), workspace.split("8bit")):
        model = PeftModel.from_pretrained(base, workspace.adapter("all"))
        seen = [workspace.outputs(model)]
        model.merge_adapter()
        seen.append(workspace.outputs(model))
        model.unmerge_adapter()
        seen.append(workspace.outputs(model))
        seen.append(workspace.outputs(model.merge_and_unload()))
        outputs.append(seen)
    whole, split = outputs
    assert [difference(a, b) for a, b in zip(whole, split)] == [0.0] * 4
    assert difference(whole[0], whole[1]) > 0.0, "a merge rounds in 8 bits: equal answers would show nothing"


def test_training_steps_leave_no_tensor_and_no_byte_behind(workspace: Any) -> None:
    from peft import PeftModel

    model = PeftModel.from_pretrained(workspace.split("8bit"), workspace.adapter("all"), is_trainable=True).train()
    batch = tiny.inputs(workspace.main)

    def step() -> None:
        model(**batch, labels=batch["input_ids"]).loss.backward()
        model.zero_grad()

    for _ in range(2):
        step()
    before = census()
    for _ in range(5):
        step()
    assert census() == before


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_layers_that_pack_their_weight_for_each_forward(workspace: Any, tmp_path: Path, kind: str, dtype: str) -> None:
    """F101: ``llm_int8_has_fp16_weight=True``. The weight stays as it is, in its dtype; a LoRA on it trains."""
    import torch
    from peft import PeftModel
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_8bit=True, llm_int8_has_fp16_weight=True, llm_int8_skip_modules=["lm_head", *tiny.plain_towers()]
    )
    batch = workspace.inputs(text_only=True)

    def load() -> Any:
        options = {"dtype": getattr(torch, dtype), "device_map": {"": workspace.main}, "quantization_config": config}
        return type(workspace.load()).from_pretrained(workspace.checkpoint, **options).eval()

    def trained(base: Any) -> tuple[float, list[Any]]:
        model = PeftModel.from_pretrained(base, workspace.adapter("language"), is_trainable=True).train()
        loss = model(**batch, labels=batch["input_ids"]).loss
        loss.backward()
        return loss.item(), [weight.grad for weight in model.parameters() if weight.grad is not None]

    def offloaded() -> Any:
        return split(workspace, kind, ("model.language_model.layers.0", "model.vision_tower"), tmp_path, model=load())

    model = offloaded()
    assert model.model.language_model.layers[0].mlp.up_proj.weight.dtype is getattr(torch, dtype)
    assert difference(workspace.outputs(load()), workspace.outputs(model)) == 0.0
    (loss, gradients), (right, expected) = trained(offloaded()), trained(load())
    assert loss == right
    assert len(gradients) == len(expected) > 0
    assert all(map(torch.equal, gradients, expected))
