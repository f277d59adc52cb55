"""transformers-load-4bit-state: a state dict of a 4-bit model is loaded, on one device and split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._lab import tiny, tiny_models
from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.checkpoints.transformers_load_4bit_state import PATCH
from tests.patches.placement.splits import EMBEDDING, HEAD, PER_LAYER, split
from tests.patches.promise import Promise

LAYER = "model.language_model.layers.0"
OFFLOADED = (EMBEDDING, HEAD, PER_LAYER, LAYER, "model.vision_tower")


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"Unexpected key\(s\) in state_dict"


def placed(workspace: Any, place: str, folder: Path, quantization: str) -> Any:
    if place == "one device":
        return workspace.load(quantization)
    return split(workspace, place, OFFLOADED, folder, quantization)


def other_weights(state: dict[str, Any]) -> dict[str, Any]:
    """Other packed bytes, and other scales."""
    return {
        name: value.flip(0).clone()
        if name.endswith(".absmax") or (name.endswith("proj.weight") and value.dtype.itemsize == 1)
        else value.clone()
        for name, value in state.items()
    }


@pytest.mark.parametrize("options", [{}, {"strict": False}, {"assign": True}], ids=str)
@pytest.mark.parametrize(
    "place",
    ["disk", pytest.param("one device", marks=pytest.mark.full), pytest.param("ram", marks=pytest.mark.full)],
)
@pytest.mark.parametrize("quantization", [pytest.param("4bit", marks=pytest.mark.full), "4bit-double"])
def test_other_weights_are_loaded_with_their_scales(
    workspace: Any, tmp_path: Path, quantization: str, place: str, options: dict[str, Any]
) -> None:
    import torch

    source = workspace.load(quantization)
    new = other_weights(source.state_dict())
    # The right answer, without a load: the same values written into a model.
    for name, parameter in source.named_parameters():
        if f"{name}.absmax" in new:
            parameter.data.copy_(new[name])
            parameter.quant_state.absmax.copy_(new[f"{name}.absmax"])
    expected = workspace.outputs(source)
    model = placed(workspace, place, tmp_path, quantization)
    before = workspace.outputs(model)
    result = model.load_state_dict({name: value.clone() for name, value in new.items()}, **options)
    assert str(result) == "<All keys matched successfully>"
    for _ in range(2):
        assert difference(expected, workspace.outputs(model)) == 0.0
    assert difference(before, expected) > 0.0
    saved = model.state_dict()
    assert saved.keys() == new.keys()
    assert not [name for name, value in saved.items() if not value.is_meta and not torch.equal(value, new[name])]
    model.load_state_dict(model.state_dict())
    assert difference(expected, workspace.outputs(model)) == 0.0


@pytest.mark.parametrize("place", ["one device", "ram"])
def test_one_layer_by_itself(workspace: Any, tmp_path: Path, place: str) -> None:
    model = placed(workspace, place, tmp_path, "4bit")
    expected = workspace.outputs(model)
    layer = model.get_submodule(f"{LAYER}.mlp.gate_proj")
    states = layer.quant_state, layer.weight.quant_state
    layer.load_state_dict(layer.state_dict())
    assert (layer.quant_state, layer.weight.quant_state) == states
    assert all(now is then for now, then in zip((layer.quant_state, layer.weight.quant_state), states))
    assert difference(expected, workspace.outputs(model)) == 0.0


def test_what_does_not_fit_is_an_error_and_not_loaded(workspace: Any) -> None:
    model = workspace.load("4bit")
    expected = workspace.outputs(model)
    up, down = (model.get_submodule(f"{LAYER}.mlp.{name}") for name in ("up_proj", "down_proj"))
    assert up.weight.nbytes == down.weight.nbytes, "as many bytes, of another shape"
    with pytest.raises(RuntimeError, match=r"size mismatch for weight: a 4-bit weight of shape \(\d+, \d+\)"):
        up.load_state_dict(down.state_dict())
    state = up.state_dict()
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"weight.absmax\""):
        up.load_state_dict({name: value for name, value in state.items() if "quant_map" not in name})
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        up.load_state_dict({**state, "weight": state["weight"][:4]})
    assert difference(expected, workspace.outputs(model)) == 0.0


def test_experts(workspace: Any, tmp_path: Path) -> None:
    import torch

    folder = workspace.cached(tiny_models.build_moe_checkpoint)
    with gemma4_compat.quantize(experts=True):
        source, model = (tiny.load(folder, "4bit-double", device=workspace.main) for _ in range(2))
    new = other_weights(source.state_dict())
    assert any(".experts." in name and name.endswith("absmax") for name in new)
    model = split(workspace, "disk", (LAYER,), tmp_path, model=model)
    for _ in range(2):
        source.load_state_dict({name: value.clone() for name, value in new.items()})
        model.load_state_dict({name: value.clone() for name, value in new.items()})
        assert difference(*(workspace.outputs(each, text_only=True) for each in (source, model))) == 0.0
        assert all(torch.equal(value, new[name]) for name, value in source.state_dict().items())
