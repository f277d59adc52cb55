"""float16 and standardized image features."""

from __future__ import annotations

from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._lab import tiny
from gemma4_compat._lab.scenarios import features, relative
from gemma4_compat.patches.multimodal.transformers_fp16_vision import BOUND, PATCH, _build_standardized
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = "the logits of a prompt with an image are NaN"
    exact = False


@pytest.mark.parametrize("quantization", [None, "4bit", "8bit"])
def test_an_image_in_float16_is_that_of_float32(workspace: Any, quantization: str | None) -> None:
    import torch

    checkpoint = workspace.cached(_build_standardized)
    models = [
        tiny.load(checkpoint, quantization, device=workspace.main, dtype=dtype, skip_modules=["model.vision_tower"])
        for dtype in (torch.float16, torch.float32)
    ]
    batch = tiny.inputs(workspace.main)
    found, expected = (features(model, batch, "vision") for model in models)
    assert relative(found, expected) < BOUND
    assert relative(features(models[0], dict(batch, pixel_values=1 - batch["pixel_values"]), "vision"), found) > 0.1
    with torch.no_grad():
        tower = models[0].model.vision_tower(batch["pixel_values"], batch["image_position_ids"], return_dict=True)
        assert tower.last_hidden_state.dtype == torch.float16
        logits = models[0](**batch).logits
    assert logits.dtype == torch.float16
    assert logits.isfinite().all()


def test_it_is_the_same_split_over_devices(workspace: Any) -> None:
    import torch

    checkpoint = workspace.cached(_build_standardized)
    model = tiny.load(checkpoint, device=workspace.main, dtype=torch.float16)
    expected = workspace.outputs(model)
    found = workspace.outputs(workspace.dispatch(model))
    assert all(torch.equal(one, other) for one, other in zip(found.logits, expected.logits))
    assert torch.equal(found.tokens, expected.tokens)


def test_bfloat16_and_float32_are_left_alone(workspace: Any) -> None:
    import torch

    batch = tiny.inputs(workspace.main)
    for dtype in (torch.bfloat16, torch.float32):
        model = tiny.load(workspace.cached(_build_standardized), device=workspace.main, dtype=dtype)
        with_patch = features(model, batch, "vision")
        gemma4_compat.revert(PATCH.id)
        try:
            without = features(model, batch, "vision")
        finally:
            gemma4_compat.install()
        assert torch.equal(with_patch, without)


def test_a_tuple_stays_one(workspace: Any) -> None:
    import torch

    batch = tiny.inputs(workspace.main)
    model = tiny.load(workspace.cached(_build_standardized), device=workspace.main, dtype=torch.float16)
    with torch.no_grad():
        found = model.model.vision_tower(batch["pixel_values"], batch["image_position_ids"], return_dict=False)
    assert isinstance(found, tuple)
    assert found[0].dtype == torch.float16
