"""Accelerate's hooks are removed from what carries them, and every weight comes back."""

from __future__ import annotations

from typing import Any

from gemma4_compat.patches.offload.accelerate_remove_hooks import PATCH
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

    from gemma4_compat._reproduction import tiny

    asked = tiny.device_map(workspace.load(), "layers", main=workspace.main, offloaded="disk")
    model = tiny.load(workspace.checkpoint, device_map=asked, offload_folder=tmp_path)
    layer = model.model.language_model.layers[0].mlp.up_proj
    mine = torch.full(layer.weight.shape, 0.5, dtype=layer.weight.dtype)
    set_module_tensor_to_device(layer, "weight", "cpu", value=mine)
    remove_hook_from_module(layer)
    assert torch.equal(layer.weight, mine)
