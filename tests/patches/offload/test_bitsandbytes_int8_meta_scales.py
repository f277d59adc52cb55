"""F28: the scales of an 8-bit weight survive a move to meta and are used from there."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.offload.bitsandbytes_int8_meta_scales import ORIGIN, PATCH, PRISTINE
from tests.patches.promise import Promise

NAME = "model.language_model.layers.0.mlp.up_proj"


class TestPromise(Promise):
    patch_id = PATCH.id
    original = (
        r"AttributeError: Linear8bitLt has no attribute `SCB`"
        r"|AttributeError: .*SCB. is neither a parameter, buffer, nor extra state"
    )


def test_a_move_to_meta_leaves_the_source_alone(workspace: Any) -> None:
    import torch

    weight = workspace.load("8bit").get_submodule(NAME).weight
    scales, values = weight.SCB, weight.SCB.cpu().clone()
    moved = weight.to("meta")
    assert moved.device.type == "meta"
    assert weight.SCB is scales
    assert torch.equal(weight.SCB.cpu(), values)
    assert moved.SCB.device.type == "cpu"
    assert torch.equal(moved.SCB, values)


def test_offload_and_back_uses_one_pristine_host_copy_and_fresh_device_copies(workspace: Any) -> None:
    import torch

    weight = workspace.load("8bit").get_submodule(NAME).weight
    data = weight.data
    offloaded = weight.to("meta")
    pristine = offloaded.SCB
    assert getattr(pristine, PRISTINE)
    for _ in range(3):
        # As accelerate does it: a parameter built from the meta one's attributes.
        statistics = {"CB": offloaded.CB, "SCB": offloaded.SCB, "has_fp16_weights": offloaded.has_fp16_weights}
        fresh = type(weight)(data, requires_grad=False, **statistics).to(workspace.main)
        assert torch.equal(fresh.CB, data)
        assert torch.equal(fresh.SCB.cpu(), pristine)
        assert fresh.SCB.device == data.device
        assert fresh.SCB.data_ptr() != pristine.data_ptr()
        assert getattr(fresh.SCB, ORIGIN) is pristine
        offloaded = fresh.to("meta")
        assert offloaded.SCB is pristine


def test_state_dict_of_an_offloaded_model_carries_the_scales_before_and_after_a_forward(workspace: Any) -> None:
    import torch

    whole, model = workspace.load("8bit").state_dict(), workspace.split("8bit")
    for _ in range(2):
        split = model.state_dict()
        assert whole.keys() == split.keys()
        scales = [name for name in whole if name.endswith(".SCB")]
        assert scales
        assert all(torch.equal(whole[name].cpu(), split[name].cpu()) for name in scales)
        assert not any(hasattr(split[name], mark) for name in scales for mark in (PRISTINE, ORIGIN))
        workspace.outputs(model)


def test_an_offloaded_model_that_has_answered_saves_and_reloads_exactly(
    workspace: Any, one_device: Callable[..., Any], tmp_path: Path
) -> None:
    model = workspace.split("8bit")
    workspace.outputs(model)
    model.save_pretrained(tmp_path)
    reloaded = type(model).from_pretrained(tmp_path, device_map={"": workspace.main}).eval()
    assert difference(one_device("8bit", None), workspace.outputs(reloaded)) == 0.0


def test_a_merged_offloaded_model_saves_and_reloads_exactly(workspace: Any, tmp_path: Path) -> None:
    from peft import PeftModel

    model = PeftModel.from_pretrained(workspace.split("8bit"), workspace.adapter("language")).merge_and_unload()
    reference = workspace.outputs(model)
    model.save_pretrained(tmp_path)
    reloaded = type(model).from_pretrained(tmp_path, device_map={"": workspace.main}).eval()
    assert difference(reference, workspace.outputs(reloaded)) == 0.0


def test_an_offloaded_model_deep_copies(workspace: Any, one_device: Callable[..., Any]) -> None:
    model = workspace.split("8bit")
    copied = copy.deepcopy(model)
    assert difference(one_device("8bit", None), workspace.outputs(copied)) == 0.0
    ours, theirs = model.get_submodule(NAME).weight, copied.get_submodule(NAME).weight
    assert ours.SCB.data_ptr() != theirs.SCB.data_ptr()
    assert difference(one_device("8bit", None), workspace.outputs(copy.deepcopy(copied))) == 0.0


def test_an_offloaded_parameter_pickles_with_its_scales(workspace: Any) -> None:
    import torch

    weight = workspace.split("8bit").get_submodule(NAME).weight
    stream = io.BytesIO()
    torch.save(weight, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    assert loaded.device.type == "meta"
    assert torch.equal(loaded.SCB, weight.SCB)
    assert torch.equal(loaded.to("meta").SCB, weight.SCB)


def test_a_parameter_whose_layer_holds_the_scales_moves_to_where_it_is(
    workspace: Any, one_device: Callable[..., Any]
) -> None:
    model = workspace.load("8bit")
    reference = workspace.outputs(model)
    layer = model.get_submodule(NAME)
    assert layer.weight.SCB is None
    layer.weight = layer.weight.to(layer.weight.device)
    assert difference(reference, workspace.outputs(model)) == 0.0


def test_parameters_that_are_not_offloaded_carry_no_mark(workspace: Any) -> None:
    model = workspace.load("8bit")
    weight = model.get_submodule(NAME).weight
    for moved in (weight, weight.to("cpu"), weight.to("cpu").to(workspace.main)):
        assert not hasattr(moved.SCB, PRISTINE)
        assert not hasattr(moved.SCB, ORIGIN)
