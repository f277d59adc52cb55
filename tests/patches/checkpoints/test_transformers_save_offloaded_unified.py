"""Saving a ``gemma4_unified`` model with offloaded embedders (F30)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemma4_compat.patches.checkpoints.transformers_save_offloaded_unified import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"Gemma4UnifiedVisionEmbedder has no attribute `embedding_projection`"


@pytest.mark.parametrize("quantization", [None, "4bit", "8bit"])
def test_every_tensor_is_saved_as_it_is_saved_from_one_device(
    workspace: Any, tmp_path: Path, quantization: str | None
) -> None:
    import torch
    from safetensors.torch import load_file

    unified = workspace.unified()
    if unified is None:
        pytest.skip("this transformers has no gemma4_unified")
    unified.load(quantization).save_pretrained(tmp_path / "whole")
    unified.split(quantization).save_pretrained(tmp_path / "split")
    whole, split = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "split"))
    assert whole.keys() == split.keys()
    for name, value in whole.items():
        assert torch.equal(value, split[name]), name


def test_other_models_of_gemma_4_are_saved_as_before(workspace: Any, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    workspace.split().save_pretrained(tmp_path)
    found, given = load_file(tmp_path / "model.safetensors"), load_file(workspace.checkpoint / "model.safetensors")
    assert found.keys() == given.keys()
    for name, value in given.items():
        assert torch.equal(value, found[name]), name
