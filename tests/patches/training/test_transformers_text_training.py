"""F58: text alone trains a model whose images see themselves in both directions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemma4_compat._engine import versions
from gemma4_compat._lab import tiny, tiny_models
from gemma4_compat.patches.training.transformers_text_training import PATCH
from tests.helpers import without
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"ValueError: `mm_token_type_ids` is required as a model input when training"


@pytest.mark.parametrize("variant", ["31B", "26B-A4B"])
def test_gradients_are_those_with_zeros_given(workspace: Any, tmp_path: Path, variant: str) -> None:
    import torch

    tiny_models.build_checkpoint(tmp_path / "model", variant=variant)
    model = tiny.load(tmp_path / "model", device=workspace.main).train()
    batch = workspace.inputs(text_only=True)
    found = []
    for more in ({}, {"mm_token_type_ids": torch.zeros_like(batch["input_ids"])}):
        model.zero_grad()
        model(**batch, **more, labels=batch["input_ids"]).loss.backward()
        found.append({name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None})
    assert found[0]
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.skipif(
    not versions.admits(PATCH.affected, versions.installed("transformers") or "0"),
    reason="transformers 5.6 does not ask for it",
)
def test_an_image_without_types_is_left_to_another_patch(workspace: Any, tmp_path: Path) -> None:
    tiny_models.build_checkpoint(tmp_path / "model", variant="31B")
    model = tiny.load(tmp_path / "model", device=workspace.main).train()
    batch = tiny.inputs(workspace.main, variant="31B")
    del batch["mm_token_type_ids"]
    with without("transformers-image-types"), pytest.raises(ValueError, match="`mm_token_type_ids` is required"):
        model(**batch, labels=batch["input_ids"])
