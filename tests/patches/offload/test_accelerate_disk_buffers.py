"""F65: the buffers of modules on disk, loaded by accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._engine import versions
from gemma4_compat._lab import tiny, tiny_models
from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.offload.accelerate_disk_buffers import PATCH, scaled_checkpoint
from tests.patches.promise import Promise

LAYER = "model.language_model.layers.0"


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"diff|differ|nan|inf|on the expected device"


@pytest.fixture
def checkpoint(workspace: Any) -> Path:
    return scaled_checkpoint(workspace)


def loaded(checkpoint: Path, placement: Any, folder: Path, **options: Any) -> Any:
    import torch
    from accelerate import load_checkpoint_and_dispatch

    model = tiny_models.empty_model(checkpoint, torch.bfloat16)
    device_map = placement(model) if callable(placement) else placement
    return load_checkpoint_and_dispatch(
        model, str(checkpoint), device_map=device_map, offload_folder=str(folder), **options
    ).eval()


def inferred(share: float, *, whole: bool = True) -> Any:
    """A map that accelerate infers for a share of the model's size."""

    def infer(model: Any) -> Any:
        from accelerate import infer_auto_device_map

        size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        classes = list(model._no_split_modules) if whole else None
        return infer_auto_device_map(model, max_memory={"cpu": int(share * size)}, no_split_module_classes=classes)

    return infer


def skip_unless_it_dispatches(placement: Any) -> None:
    if placement == {"": "disk"} and versions.admits("<1.15", versions.installed("accelerate") or "0"):
        pytest.skip("accelerate before 1.15 refuses to dispatch a whole model to the disk: `use disk_offload`")


def apart(*offloaded: str) -> Any:
    def placement(model: Any) -> Any:
        found = tiny.device_map(model, "none", main="cpu", offloaded="disk")
        return found | dict.fromkeys(offloaded, "disk")

    return placement


@pytest.mark.parametrize(
    "placement, options",
    [
        pytest.param(inferred(0.3), {}, id="infer 0.3"),
        pytest.param(inferred(0.5), {}, id="infer 0.5"),
        pytest.param(inferred(0.9), {}, id="infer 0.9"),
        pytest.param(inferred(0.9, whole=False), {}, id="split modules"),
        pytest.param(inferred(0.5), {"offload_buffers": True}, id="offload_buffers"),
        pytest.param(inferred(0.5), {"offload_state_dict": True}, id="offload_state_dict"),
        pytest.param(inferred(0.5), {"dtype": "bfloat16"}, id="dtype"),
        pytest.param({"": "disk"}, {}, id="everything"),
        pytest.param({"": "cpu", LAYER: "disk"}, {}, id="nested"),
        pytest.param(apart("model.language_model.embed_tokens"), {}, id="embedding"),
        pytest.param(apart("lm_head"), {}, id="head"),
        pytest.param(apart("lm_head", "model.language_model.embed_tokens"), {}, id="embedding and head"),
    ],
)
def test_what_accelerate_loads_answers_like_one_device(
    workspace: Any, checkpoint: Path, tmp_path: Path, placement: Any, options: dict[str, Any]
) -> None:
    if workspace.main != "cpu":
        pytest.skip("maps for a CPU and a disk")
    skip_unless_it_dispatches(placement)
    reference = workspace.outputs(loaded(checkpoint, {"": "cpu"}, tmp_path / "one"))
    model = loaded(checkpoint, placement, tmp_path / "split", **options)
    assert difference(reference, workspace.outputs(model)) == 0.0


def test_a_buffer_of_a_layer_on_disk_has_the_value_of_the_checkpoint(
    workspace: Any, checkpoint: Path, tmp_path: Path
) -> None:
    placement = {"": "cpu", LAYER: "disk"}
    model = loaded(checkpoint, placement, tmp_path / "on")
    assert model.get_buffer(f"{LAYER}.layer_scalar").item() == 0.5
    assert model.hf_device_map == placement
    gemma4_compat.revert(PATCH.id)
    try:
        assert loaded(checkpoint, placement, tmp_path / "off").get_buffer(f"{LAYER}.layer_scalar").item() == 1.0
    finally:
        gemma4_compat.install()


def test_a_model_of_another_family_gets_its_buffers_too(tmp_path: Path) -> None:
    import torch
    from accelerate import load_checkpoint_in_model
    from safetensors.torch import save_file

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    weights = {name: torch.full_like(value, 3) for name, value in model.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    load_checkpoint_in_model(
        model, str(tmp_path), device_map={"0": "cpu", "1": "disk"}, offload_folder=str(tmp_path / "offload")
    )
    assert model[1].weight.device.type == "meta"
    assert torch.equal(model[1].running_mean, torch.full((2,), 3.0))
    assert model[1].num_batches_tracked.item() == 3


@pytest.mark.parametrize(
    "placement", [{"": "cpu", LAYER: "disk", "model.vision_tower": "disk"}, {"": "disk"}], ids=["parts", "everything"]
)
def test_without_a_dtype_the_model_keeps_its_own(workspace: Any, tmp_path: Path, placement: dict[str, str]) -> None:
    import torch
    from accelerate import load_checkpoint_and_dispatch

    if workspace.main != "cpu":
        pytest.skip("maps for a CPU and a disk")
    skip_unless_it_dispatches(placement)
    found = []
    for device_map in ({"": "cpu"}, placement):
        model = tiny_models.empty_model(workspace.checkpoint, torch.float32)
        folder = str(tmp_path / str(len(found)))
        load_checkpoint_and_dispatch(model, str(workspace.checkpoint), device_map=device_map, offload_folder=folder)
        assert {weight.dtype for weight in model.parameters()} == {torch.float32}
        found.append(workspace.outputs(model.eval()))
    assert difference(*found) == 0.0
