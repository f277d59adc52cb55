"""F2: a quantization state survives a move to meta, is never repacked there, and never stays on the device."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._gemma4.quantization import quant_states
from gemma4_compat._lab import tiny
from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.offload.bitsandbytes_meta_quant_state import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"Tensor.item\(\) cannot be called on meta tensors|Cannot copy out of meta tensor"


@pytest.fixture(params=["4bit", "4bit-double"])
def quantization(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_as_dict_of_an_offloaded_layer_has_true_values(workspace: Any, quantization: str) -> None:
    import torch

    name = "model.language_model.layers.0.mlp.up_proj"
    before = workspace.load(quantization).get_submodule(name).weight.quant_state.as_dict()
    weight = workspace.split(quantization).get_submodule(name).weight
    assert weight.device.type == "meta"
    after = weight.quant_state.as_dict()
    assert before.keys() == after.keys()
    assert ("nested_offset" in before) == (quantization == "4bit-double")
    for key, value in before.items():
        assert torch.equal(value.cpu(), after[key]) if isinstance(value, torch.Tensor) else value == after[key]


def test_a_move_to_meta_leaves_the_source_alone(workspace: Any, quantization: str) -> None:
    import torch
    from bitsandbytes.functional import dequantize_4bit

    weight = workspace.load(quantization).model.language_model.layers[0].mlp.up_proj.weight
    values = dequantize_4bit(weight.data, weight.quant_state)
    state = weight.quant_state
    moved = weight.to("meta")
    assert moved.device.type == "meta"
    assert weight.quant_state is state
    assert moved.quant_state is not state
    assert torch.equal(dequantize_4bit(weight.data, weight.quant_state), values)


def test_offload_and_back_uses_one_pristine_host_copy_and_fresh_device_copies(
    workspace: Any, quantization: str
) -> None:
    import torch

    weight = workspace.load(quantization).model.language_model.layers[0].mlp.up_proj.weight
    data = weight.data
    offloaded = weight.to("meta")
    pristine = offloaded.quant_state
    assert pristine.absmax.device.type == "cpu"
    for _ in range(3):
        # As accelerate does it: a parameter built from the meta one's attributes.
        fresh = type(weight)(data, requires_grad=False, **vars(offloaded)).to(workspace.main)
        assert fresh.quant_state is not pristine
        assert fresh.quant_state.absmax.data_ptr() != pristine.absmax.data_ptr()
        assert torch.equal(fresh.quant_state.absmax.cpu(), pristine.absmax)
        fresh.quant_state.absmax = fresh.quant_state.absmax.bfloat16()  # what repacking does to it (F18)
        offloaded = fresh.to("meta")
        assert offloaded.quant_state is pristine


def test_an_eval_forward_does_not_change_the_pristine_state(workspace: Any, quantization: str) -> None:
    import torch

    model = workspace.split(quantization, "layers")
    layer = model.model.language_model.layers[0].mlp.up_proj
    before = {name: value for name, value in vars(layer.weight.quant_state).items()}
    with torch.no_grad():
        model(**tiny.inputs(workspace.main))
    assert not quant_states.is_packed(layer.weight.quant_state)
    after = vars(layer.weight.quant_state)
    assert after.keys() == before.keys()
    assert all(after[name] is value for name, value in before.items())


def test_the_module_does_not_keep_the_state_on_the_device(workspace: Any, quantization: str) -> None:
    layer = workspace.split(quantization, "layers").model.language_model.layers[0].mlp.up_proj
    if layer.quant_state is not None:
        assert layer.quant_state is layer.weight.quant_state


def test_a_direct_move_of_a_state_to_meta_keeps_its_values(workspace: Any, quantization: str) -> None:
    import torch

    state = workspace.load(quantization).model.language_model.layers[0].mlp.up_proj.weight.quant_state
    absmax, code = state.absmax.cpu().clone(), state.code.cpu().clone()
    state.to("meta")
    assert torch.equal(state.absmax.cpu(), absmax)
    state.to(workspace.main)
    assert torch.equal(state.code.cpu(), code)


def test_offloaded_parameters_deep_copy_and_pickle_with_their_state(workspace: Any, quantization: str) -> None:
    import torch

    weight = workspace.split(quantization, "layers").model.language_model.layers[0].mlp.up_proj.weight
    stream = io.BytesIO()
    torch.save(weight.quant_state, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    copied = copy.deepcopy(weight.quant_state)
    for state in (loaded, copied):
        assert torch.equal(state.absmax, weight.quant_state.absmax)
        assert state.absmax.data_ptr() != weight.quant_state.absmax.data_ptr()
        assert type(state) is type(weight.quant_state)


def test_state_dict_of_an_offloaded_model_carries_the_states(workspace: Any, quantization: str) -> None:
    import torch

    whole, split = workspace.load(quantization).state_dict(), workspace.split(quantization).state_dict()
    assert whole.keys() == split.keys()
    states = [name for name in whole if ".weight." in name]
    assert states
    assert all(torch.equal(whole[name].cpu(), split[name].cpu()) for name in states)


def test_an_offloaded_model_saves_and_reloads_exactly(
    workspace: Any, one_device: Any, quantization: str, tmp_path: Path
) -> None:
    workspace.split(quantization, "layers").save_pretrained(tmp_path)
    reloaded = type(workspace.load())  # the class, loaded from what was written
    model = reloaded.from_pretrained(tmp_path, device_map={"": workspace.main}).eval()
    assert difference(one_device(quantization, None), workspace.outputs(model)) == 0.0


def test_a_state_destroyed_before_the_patch_was_active_is_an_error_that_says_so(workspace: Any) -> None:
    layer = workspace.load("4bit-double").model.language_model.layers[0].mlp.up_proj
    gemma4_compat.revert(PATCH.id)
    try:
        weight = layer.weight.to("meta")
    finally:
        gemma4_compat.install()
    with pytest.raises(gemma4_compat.Gemma4CompatError, match=r"destroyed by an earlier move to meta.*load the model"):
        weight.quant_state.as_dict()
    with pytest.raises(gemma4_compat.Gemma4CompatError, match=r"destroyed by an earlier move to meta.*load the model"):
        weight.quant_state.to(workspace.main)


def test_a_model_built_before_the_patch_is_repaired(workspace: Any, one_device: Any, quantization: str) -> None:
    gemma4_compat.revert()
    try:
        model = workspace.load(quantization)
    finally:
        gemma4_compat.install()
    assert difference(one_device(quantization, None), workspace.outputs(workspace.dispatch(model))) == 0.0


def test_an_offloaded_model_deep_copies(workspace: Any, one_device: Any, quantization: str) -> None:
    copied = copy.deepcopy(workspace.split(quantization, "layers"))
    assert difference(one_device(quantization, None), workspace.outputs(copied)) == 0.0
