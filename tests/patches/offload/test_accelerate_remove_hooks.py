"""Accelerate's hooks are removed from what carries them, and every weight comes back."""

from __future__ import annotations

from typing import Any

import pytest

from gemma4_compat._lab.workspace import difference
from gemma4_compat.patches.offload.accelerate_remove_hooks import PATCH
from tests.patches.placement.splits import EMBEDDING, HEAD, KINDS, split
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"\d+ weights stay on meta without a hook|has no attribute '_hf_hook'"


def test_a_wrapper_that_shows_the_hook_of_what_it_holds_keeps_its_own_forward(workspace: Any) -> None:
    from accelerate.hooks import remove_hook_from_module, remove_hook_from_submodules
    from peft import PeftModel

    model = PeftModel.from_pretrained(workspace.split(), workspace.adapter("language"))
    assert "_hf_hook" not in vars(model)
    assert hasattr(model, "_hf_hook")
    assert remove_hook_from_module(model) is model  # not recursive: nothing to remove here
    assert hasattr(model.get_base_model(), "_hf_hook")
    remove_hook_from_module(model, recurse=True)
    assert not [module for module in model.modules() if "_hf_hook" in vars(module)]
    assert "forward" not in vars(model)
    remove_hook_from_submodules(model)  # twice is once


def test_a_weight_that_was_put_there_meanwhile_is_kept(workspace: Any, tmp_path: Any) -> None:
    import torch
    from accelerate.hooks import remove_hook_from_module
    from accelerate.utils import set_module_tensor_to_device

    from gemma4_compat._lab import tiny

    asked = tiny.device_map(workspace.load(), "layers", main=workspace.main, offloaded="disk")
    model = tiny.load(workspace.checkpoint, device_map=asked, offload_folder=tmp_path)
    layer = model.model.language_model.layers[0].mlp.up_proj
    mine = torch.full(layer.weight.shape, 0.5, dtype=layer.weight.dtype)
    set_module_tensor_to_device(layer, "weight", "cpu", value=mine)
    remove_hook_from_module(layer)
    assert torch.equal(layer.weight, mine)


@pytest.mark.parametrize("recurse", [True, False], ids=["from the model", "from submodules"])
@pytest.mark.parametrize("offloaded", [(EMBEDDING,), (HEAD,), (EMBEDDING, HEAD)], ids=["embedding", "head", "both"])
@pytest.mark.parametrize("kind", KINDS)
def test_tied_weights_are_one_again(
    workspace: Any, tmp_path: Any, kind: str, offloaded: tuple[str, ...], recurse: bool
) -> None:
    from accelerate.hooks import remove_hook_from_module, remove_hook_from_submodules
    from safetensors.torch import load_file

    model = split(workspace, kind, offloaded, tmp_path)
    workspace.outputs(model)
    if recurse:
        remove_hook_from_module(model, recurse=True)
    else:
        remove_hook_from_submodules(model)
    embedding = model.get_input_embeddings()
    assert model.lm_head.weight is embedding.weight
    model.save_pretrained(tmp_path / "saved")
    assert "lm_head.weight" not in load_file(tmp_path / "saved" / "model.safetensors")


def test_tied_weights_that_have_other_values_stay_two(workspace: Any) -> None:
    import torch
    from accelerate.hooks import remove_hook_from_module

    state = workspace.load().state_dict()
    state[f"{HEAD}.weight"] = state[f"{HEAD}.weight"] * 2
    model = split(workspace, "ram", (HEAD,), None)
    model.load_state_dict(state, assign=True)
    remove_hook_from_module(model, recurse=True)
    assert torch.equal(model.lm_head.weight, model.get_input_embeddings().weight * 2)


def test_a_half_of_a_tied_weight_alone_stays_apart(workspace: Any) -> None:
    from accelerate.hooks import remove_hook_from_module

    model = split(workspace, "ram", (EMBEDDING, HEAD), None)
    expected = workspace.outputs(workspace.load())
    remove_hook_from_module(model.lm_head)
    assert model.get_input_embeddings().weight.device.type == "meta"
    assert model.lm_head.weight.device.type == "cpu"
    assert difference(expected, workspace.outputs(model)) == 0.0
