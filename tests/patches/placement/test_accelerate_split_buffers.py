"""F65: accelerate's maps cover the buffers of the modules that they split."""

from __future__ import annotations

from typing import Any

import pytest

from gemma4_compat._gemma4.accelerate import device_maps
from gemma4_compat._lab import tiny
from gemma4_compat.patches.placement.accelerate_split_buffers import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"does not give any device for the following parameters|gives no device for"


def test_every_tensor_has_a_device_and_what_was_there_is_as_before(workspace: Any) -> None:
    from accelerate import infer_auto_device_map

    model = workspace.load().to("meta")
    size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    for share in (0.1, 0.3, 0.5, 0.7, 0.9, 1.5):
        for memory in ({"cpu": int(share * size)}, {0: int(share * size), "cpu": size}):
            found = infer_auto_device_map(model, max_memory=dict(memory))
            upstream = infer_auto_device_map.__wrapped__(model, max_memory=dict(memory))
            assert found.items() >= upstream.items()
            assert not [name for name in model.state_dict() if device_maps.entry_for(name, found) is None]


def test_a_buffer_goes_where_the_first_part_of_its_module_computes() -> None:
    import torch

    model = torch.nn.Module()
    model.layer = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    model.layer.register_buffer("scale", torch.ones(1))
    placed = {"layer.0": "disk", "layer.1": 1, "other": 0}
    assert device_maps.with_buffers(model, placed) == {**placed, "layer.scale": 1}
    assert device_maps.with_buffers(model, {"layer.0": "cpu", "layer.1": "disk"})["layer.scale"] == "cpu"
    assert device_maps.with_buffers(model, {"": 0}) == {"": 0}


def test_the_map_is_dispatched_without_a_word_about_its_buffers(
    workspace: Any, recwarn: pytest.WarningsRecorder
) -> None:
    from accelerate.utils import check_device_map

    model = workspace.load()
    layer = "model.language_model.layers.0"
    parts = [f"{layer}.{name}" for name, _ in model.get_submodule(layer).named_children()]
    others = tiny.device_map(model, "none", main="cpu", offloaded="disk")
    others = {name: device for name, device in others.items() if name != layer}
    placement = device_maps.with_buffers(model, others | dict.fromkeys(parts, "disk"))
    assert f"{layer}.layer_scalar" in placement
    for complete in (placement, {"": "cpu", **placement}):
        check_device_map(model, complete)
    assert not [str(warning.message) for warning in recwarn if "do not match" in str(warning.message)]
    placement.pop("lm_head")
    with pytest.warns(UserWarning, match="layer_scalar"), pytest.raises(ValueError, match=r"lm_head\.weight"):
        check_device_map(model, placement)
    with pytest.warns(UserWarning, match=r"\['nothing'\]"):
        check_device_map(model, {"": "cpu", "nothing": "disk", f"{layer}.layer_scalar": "cpu"})


def test_a_model_of_another_family_is_left_to_accelerate() -> None:
    import torch
    from accelerate import infer_auto_device_map

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model.register_buffer("scale", torch.ones(1))
    found = infer_auto_device_map(model, max_memory={"cpu": 170})
    assert found == infer_auto_device_map.__wrapped__(model, max_memory={"cpu": 170})
