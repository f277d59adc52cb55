"""F48: ``load_state_dict`` of models with offloaded weights."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.checkpoints.accelerate_load_offloaded import PATCH
from tests.patches.placement.splits import EMBEDDING, HEAD, KINDS, PER_LAYER, split
from tests.patches.promise import Promise

LAYERS = ("model.language_model.layers.0", "model.language_model.layers.2")
OFFLOADED = {
    "embedding": (EMBEDDING,),
    "head": (HEAD,),
    "everything": (EMBEDDING, HEAD, PER_LAYER, *LAYERS, "model.vision_tower"),
}
#: What a state dict has of the tied pair.
TIED = {"both": (), "embedding": (f"{HEAD}.weight",), "head": (f"{EMBEDDING}.weight",)}


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"All keys matched successfully"


def other_weights(workspace: Any, without: tuple[str, ...] = ()) -> dict[str, Any]:
    found = {name: tensor * 1.5 for name, tensor in workspace.load().state_dict().items()}
    return {name: tensor for name, tensor in found.items() if name not in without}


@pytest.mark.parametrize("used", [False, True], ids=["before a forward", "after"])
@pytest.mark.parametrize("offloaded", OFFLOADED)
@pytest.mark.parametrize("kind", KINDS)
def test_is_as_on_one_device(workspace: Any, tmp_path: Path, kind: str, offloaded: str, used: bool) -> None:
    for without in TIED.values():
        state = other_weights(workspace, without)
        reference = workspace.load()
        reference.load_state_dict(state, strict=False)
        model = split(workspace, kind, OFFLOADED[offloaded], tmp_path / str(without))
        placement = {name: tensor.device for name, tensor in model.state_dict().items()}
        if used:
            workspace.outputs(model)
            placement = {name: tensor.device for name, tensor in model.state_dict().items()}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = model.load_state_dict(state, strict=not without)
        assert (list(result.missing_keys), result.unexpected_keys) == (list(without), [])
        assert difference(workspace.outputs(reference), workspace.outputs(model)) == 0.0, without
        if used:
            assert placement == {name: tensor.device for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("kind", KINDS)
def test_assigned_weights_are_used(workspace: Any, tmp_path: Path, kind: str) -> None:
    import torch

    state = {name: tensor.float() for name, tensor in other_weights(workspace).items()}
    state[f"{HEAD}.weight"] = state[f"{HEAD}.weight"] * 2  # tied no more
    reference = workspace.load()
    reference.load_state_dict(state, assign=True)
    model = split(workspace, kind, OFFLOADED["everything"], tmp_path)
    workspace.outputs(model)
    model.load_state_dict(state, assign=True)
    batch = workspace.inputs(text_only=True)
    with torch.no_grad():
        assert torch.equal(reference(**batch).logits, model(**batch).logits)
    assert model.lm_head.weight.dtype is torch.float32


def test_what_does_not_fit_is_an_error_and_not_loaded(workspace: Any, tmp_path: Path) -> None:
    model = split(workspace, "disk", OFFLOADED["everything"], tmp_path)
    expected, files = workspace.outputs(model), set(tmp_path.iterdir())
    name = f"{LAYERS[0]}.mlp.up_proj.weight"
    with pytest.raises(RuntimeError, match="size mismatch for"):
        model.load_state_dict({name: model.state_dict()[name].new_zeros(3, 3, device="cpu")}, strict=False)
    with pytest.raises(RuntimeError, match=r"Missing key\(s\)"):
        model.load_state_dict({})
    assert difference(expected, workspace.outputs(model)) == 0.0
    assert set(tmp_path.iterdir()) == files


@pytest.mark.parametrize("quantization", ["4bit-double", "8bit"])
@pytest.mark.parametrize("kind", ["disk", "ram"])
def test_quantized_layers(workspace: Any, tmp_path: Path, kind: str, quantization: str) -> None:
    def load(model: Any) -> tuple[Any, Any]:
        # On one device, too, bitsandbytes' 4-bit scales are keys that torch does not know.
        scaled = {name: tensor * 1.5 if name.endswith("SCB") else tensor for name, tensor in state.items()}
        known = {name: tensor for name, tensor in scaled.items() if ".weight." not in name}
        return model, model.load_state_dict(known)

    state = workspace.load(quantization).state_dict()
    for name in [name for name in state if name.endswith("proj.weight") and state[name].dtype.itemsize == 1]:
        state[name] = state[name].flip(0)
    reference, expected = load(workspace.load(quantization))
    model = split(workspace, kind, OFFLOADED["everything"], tmp_path, quantization)
    model, found = load(model)  # after a forward bitsandbytes refuses it, on one device as well
    assert str(found) == str(expected)
    assert difference(workspace.outputs(reference), workspace.outputs(model)) == 0.0


def test_adapters_load_and_the_optimizer_goes_on(workspace: Any, tmp_path: Path) -> None:
    import torch
    from peft import PeftModel

    def trained(model: Any) -> Any:
        model = PeftModel.from_pretrained(model, workspace.adapter("language"), is_trainable=True)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
        batch = workspace.inputs(text_only=True)
        state = {
            f"base_model.model.{name}": tensor
            for name, tensor in other_weights(workspace).items()
            if f"base_model.model.{name}" in model.state_dict()
        }
        for number in range(2):
            model(**batch, labels=batch["input_ids"]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 0:
                model.load_state_dict(state, strict=False)
        return model

    expected = workspace.outputs(trained(workspace.load()), text_only=True)
    model = trained(split(workspace, "disk", OFFLOADED["everything"], tmp_path))
    assert difference(expected, workspace.outputs(model, text_only=True)) == 0.0


@pytest.mark.parametrize("how", ["dict", "strict=False", "assign", "file", "copy", "submodule"])
@pytest.mark.parametrize("quantization", [None, "4bit", "8bit"])
@pytest.mark.parametrize("kind", ["disk", "ram"])
def test_its_own_state_dict_changes_nothing(
    workspace: Any, tmp_path: Path, kind: str, quantization: str | None, how: str
) -> None:
    """Where an entry is on meta, the stored value stays; what has a value comes back."""
    import copy

    import torch

    if (quantization, how) == ("8bit", "assign"):
        pytest.skip("bitsandbytes refuses it, on one device as well")
    model = split(workspace, kind, OFFLOADED["everything"], tmp_path, quantization)
    expected = workspace.outputs(model)
    part = model.get_submodule(LAYERS[0]) if how == "submodule" else model
    state = part.state_dict()
    assert any(value.is_meta for value in state.values())
    if how == "file":
        torch.save(state, tmp_path / "state.bin")
        state = torch.load(tmp_path / "state.bin", weights_only=True)
    elif how == "copy":
        state = copy.deepcopy(state)
    norm = model.model.language_model.norm.weight
    saved = norm.detach().clone()
    if how in ("file", "copy"):
        with torch.no_grad():
            norm.mul_(2)
    parameters = {name: type(value) for name, value in model.named_parameters() if value.is_meta}
    part.load_state_dict(state, strict=how != "strict=False", assign=how == "assign")
    assert torch.equal(model.model.language_model.norm.weight, saved)
    assert parameters == {name: type(value) for name, value in model.named_parameters() if value.is_meta}
    assert difference(expected, workspace.outputs(model)) == 0.0


def test_of_two_tied_weights_the_one_with_a_value_is_loaded(workspace: Any, tmp_path: Path) -> None:
    import torch

    model = split(workspace, "ram", OFFLOADED["head"], tmp_path)
    reference = workspace.load()
    state = model.state_dict()
    workspace.outputs(model)
    state |= {f"{HEAD}.weight": state[f"{HEAD}.weight"].to("meta")}
    for name in (f"{EMBEDDING}.weight",):
        state[name] = state[name] * 1.5
        with torch.no_grad():
            reference.get_parameter(name).mul_(1.5)
    model.load_state_dict(state)
    assert difference(workspace.outputs(reference), workspace.outputs(model)) == 0.0


def test_the_scales_of_an_8bit_weight_are_loaded_beside_a_weight_on_meta(workspace: Any, tmp_path: Path) -> None:
    model = split(workspace, "ram", OFFLOADED["everything"], tmp_path, "8bit")
    reference = workspace.load("8bit")
    scaled = {name: value * 1.5 if name.endswith("SCB") else value for name, value in model.state_dict().items()}
    model.load_state_dict(scaled)
    reference.load_state_dict({name: value for name, value in scaled.items() if not value.is_meta}, strict=False)
    state = reference.state_dict()
    reference.load_state_dict({name: scaled[name] if name.endswith("SCB") else state[name] for name in state})
    assert difference(workspace.outputs(reference), workspace.outputs(model)) == 0.0


def test_adapters_come_back_from_a_copy_in_memory(workspace: Any, tmp_path: Path) -> None:
    """The best weights, kept beside the training; and through PEFT, the adapter only."""
    import copy

    import torch
    from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict

    base = split(workspace, "disk", OFFLOADED["everything"], tmp_path)
    model = PeftModel.from_pretrained(base, workspace.adapter("language"), is_trainable=True)
    expected = workspace.outputs(model)
    best, adapter = (copy.deepcopy(state) for state in (model.state_dict(), get_peft_model_state_dict(model)))
    for load in (
        lambda: model.load_state_dict(best),
        lambda: model.load_state_dict(best, strict=False),
        lambda: set_peft_model_state_dict(model, adapter),
    ):
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.5)
        assert difference(expected, workspace.outputs(model)) > 0.0
        load()
        assert difference(expected, workspace.outputs(model)) == 0.0


def test_an_average_of_the_weights(workspace: Any, tmp_path: Path) -> None:
    from torch.optim.swa_utils import AveragedModel

    model = split(workspace, "ram", OFFLOADED["everything"], tmp_path)
    expected = workspace.outputs(model)
    averaged = AveragedModel(model)
    averaged.update_parameters(model)
    averaged.load_state_dict(averaged.state_dict())
    model.load_state_dict(averaged.module.state_dict())
    assert difference(expected, workspace.outputs(model)) == 0.0
