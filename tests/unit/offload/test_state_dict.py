"""Streamed layers in host memory: their module groups' buffers do not show in what is saved or copied (F47)."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._lab.workspace import difference
from tests.patches.placement.splits import split

LAYERS = ("model.language_model.layers.0", "model.language_model.layers.2")


def saved(model: Any) -> bytes:
    import torch

    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return file.getvalue()


def on_host(model: Any) -> dict[str, Any]:
    """What accelerate holds for the offloaded layers, and the quantization tensors beside it."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        hook = getattr(module, "_hf_hook", None)
        if getattr(hook, "offload", False):
            found.update({f"{name}.{key}": hook.weights_map[key] for key, _ in module.named_parameters(recurse=False)})
    state = {name: tensor for name, tensor in model.state_dict().items() if tensor.device.type != "meta"}
    state.pop("lm_head.weight")  # that of the embedding
    return {**state, **found}


@pytest.mark.parametrize("quantization", [None, "4bit", "4bit-double", "8bit"])
def test_a_forward_changes_nothing_that_is_saved(workspace: Any, tmp_path: Path, quantization: str | None) -> None:
    import torch
    from safetensors.torch import save

    model = split(workspace, "ram", LAYERS, None, quantization)
    state, host, size = saved(model), save(on_host(model)), len(saved(model))
    expected = workspace.outputs(model)
    assert len(saved(model)) == size
    assert save(on_host(model)) == host
    first, second = (torch.load(io.BytesIO(data)) for data in (state, saved(model)))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert (tensor.dtype, tensor.device) == (second[name].dtype, second[name].device), name
        assert tensor.device.type == "meta" or torch.equal(tensor, second[name]), name
    for tensor in on_host(model).values():
        # whole storages are saved and copied, each as of one dtype
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    copied = copy.deepcopy(model)
    assert difference(expected, workspace.outputs(copied)) == 0.0
    assert difference(expected, workspace.outputs(model)) == 0.0
