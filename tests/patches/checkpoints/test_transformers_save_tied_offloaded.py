"""F49: ``save_pretrained`` of models with their embedding or head offloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._lab import tiny
from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.checkpoints.transformers_save_tied_offloaded import PATCH
from tests.patches.placement.splits import EMBEDDING, HEAD, KINDS, PER_LAYER, split
from tests.patches.promise import Promise

OFFLOADED = {"embedding": (EMBEDDING,), "head": (HEAD,), "both": (EMBEDDING, HEAD, PER_LAYER)}


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"lm_head\.weight"
    exact = False


def save(model: Any, folder: Path, **options: Any) -> dict[str, Any]:
    """What it saves, by name. Upstream does not sort offloaded models' tensors into shards, so these may differ."""
    from safetensors.torch import load_file

    model.save_pretrained(folder, **options)
    files = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    for path in folder.glob("*.index.json"):
        there = {name: file for file, tensors in files.items() for name in tensors}
        assert json.loads(path.read_text())["weight_map"] == there
    return {name: tensor for tensors in files.values() for name, tensor in tensors.items()}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    import torch

    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("used", [False, True], ids=["before a forward", "after"])
@pytest.mark.parametrize("offloaded", OFFLOADED)
@pytest.mark.parametrize("kind", KINDS)
def test_the_checkpoint_is_that_of_one_device(
    workspace: Any, tmp_path: Path, kind: str, offloaded: str, used: bool
) -> None:
    model = split(workspace, kind, OFFLOADED[offloaded], tmp_path / "offload")
    if used:
        workspace.outputs(model)
    for number, options in enumerate([{}, {"max_shard_size": "100KB"}]):
        expected = save(workspace.load(), tmp_path / f"expected-{number}", **options)
        assert_same(save(model, tmp_path / f"saved-{number}", **options), expected)
    reloaded = tiny.load(tmp_path / "saved-1")
    assert difference(workspace.outputs(workspace.load()), workspace.outputs(reloaded)) == 0.0


def _prepare(model: Any) -> Any:
    from peft import prepare_model_for_kbit_training

    return prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


def _to_float32(model: Any) -> Any:
    import torch

    return model.to(torch.float32)


CHANGES = {
    "to": _to_float32,
    "float": lambda model: model.float(),
    "half": lambda model: model.half(),
    "half-float": lambda model: model.half().float(),
    "prepare": _prepare,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_saved_in_the_dtype_that_the_model_has_now(
    workspace: Any, tmp_path: Path, kind: str, change: str
) -> None:
    expected = save(CHANGES[change](workspace.load()), tmp_path / "expected")
    names = (*OFFLOADED["both"], "model.language_model.layers.1")
    model = CHANGES[change](split(workspace, kind, names, tmp_path / "offload"))
    assert_same(save(model, tmp_path / "saved"), expected)
    workspace.outputs(model, text_only=True)
    assert_same(save(model, tmp_path / "saved-again"), expected)


@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_the_bytes_of_quantized_weights_are_saved_as_they_are(
    workspace: Any, tmp_path: Path, quantization: str
) -> None:
    expected = save(_prepare(workspace.load(quantization)), tmp_path / "expected")
    names = (*OFFLOADED["both"], "model.language_model.layers.1")
    model = _prepare(split(workspace, "ram", names, None, quantization))
    assert_same(save(model, tmp_path / "saved"), expected)


def test_with_an_adapter_the_base_below_it_and_the_adapter_alone(workspace: Any, tmp_path: Path) -> None:
    from peft import PeftModel

    models = {"expected": workspace.load(), "saved": split(workspace, "ram", OFFLOADED["both"], None)}
    found = {}
    for name, model in models.items():
        wrapped = PeftModel.from_pretrained(model, workspace.adapter("language"))
        wrapped.save_pretrained(tmp_path / f"{name}-adapter")
        found[name] = save(wrapped.unload(), tmp_path / name)
    assert_same(found["saved"], found["expected"])
    first, second = (
        (tmp_path / f"{name}-adapter" / "adapter_model.safetensors").read_bytes() for name in ("expected", "saved")
    )
    assert first == second


def test_weights_that_differ_are_both_saved(workspace: Any, tmp_path: Path) -> None:
    state = workspace.load().state_dict()
    state[f"{HEAD}.weight"] = state[f"{HEAD}.weight"] * 2
    model = split(workspace, "ram", OFFLOADED["both"], None)
    model.load_state_dict(state, assign=True)
    saved = save(model, tmp_path)
    assert (saved[f"{HEAD}.weight"] == saved[f"{EMBEDDING}.weight"] * 2).all()


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_offloaded_buffers_are_saved(workspace: Any, tmp_path: Path, kind: str) -> None:
    """F98: up to transformers 5.13.1 upstream looks for them among the parameters."""
    import torch
    from accelerate import dispatch_model

    model = workspace.load()
    main: Any = torch.device("cpu") if kind == "ram" else "cpu"
    placement = tiny.device_map(model, "both", main=main, offloaded="cpu" if kind == "ram" else "disk")
    options = {"main_device": main} if kind == "ram" else {"offload_dir": tmp_path / "offload"}
    dispatch_model(model, placement, skip_keys=tiny.skip_keys(model), offload_buffers=True, **options)
    assert any(value.is_meta for _, value in model.named_buffers())
    found = save(model, tmp_path / "saved")
    expected = save(workspace.load(), tmp_path / "expected")
    assert_same(found, expected)
    assert difference(workspace.reference(), workspace.outputs(model)) == 0.0
