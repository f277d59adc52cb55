"""float16 and the patches of an image in the 12B."""

from __future__ import annotations

from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._lab import tiny
from gemma4_compat._lab.scenarios import features, relative
from gemma4_compat.patches.multimodal.transformers_fp16_vision_unified import BOUND, PATCH, build_bright
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = "the logits of a prompt with an image are NaN"
    exact = False


@pytest.fixture
def bright(workspace: Any) -> Any:
    if workspace.unified() is None:
        pytest.skip("this transformers has no 12B")
    return workspace.cached(build_bright)


def _features(model: Any) -> Any:
    return features(model, tiny.unified_inputs(model.device), "vision")


def _without(model: Any) -> Any:
    gemma4_compat.revert(PATCH.id)
    try:
        return _features(model)
    finally:
        gemma4_compat.install()


@pytest.mark.parametrize("quantization", [None, "4bit", "8bit"])
def test_an_image_in_float16_is_that_of_float32(workspace: Any, bright: Any, quantization: str | None) -> None:
    import torch

    found, expected = (
        _features(tiny.load(bright, quantization, device=workspace.main, dtype=dtype, towers=True))
        for dtype in (torch.float16, torch.float32)
    )
    assert relative(found, expected) < BOUND


def test_patches_within_float16_keep_their_bits(workspace: Any, bright: Any) -> None:
    import torch

    model = tiny.load(bright, device=workspace.main, dtype=torch.float16)
    found, upstream = _features(model), _without(model)
    finite = upstream.isfinite().all(-1)
    assert 0 < finite.sum() < len(finite)
    assert torch.equal(found[finite], upstream[finite])
    expected = _features(tiny.load(bright, device=workspace.main, dtype=torch.float32))
    errors = [relative(found[rows], expected[rows]) for rows in (finite, ~finite)]
    assert errors[1] < 2 * errors[0]


def test_other_dtypes_keep_their_bits(workspace: Any, bright: Any) -> None:
    import torch

    for dtype in (torch.bfloat16, torch.float32):
        model = tiny.load(bright, device=workspace.main, dtype=dtype)
        assert torch.equal(_features(model), _without(model))


def test_autocast(workspace: Any, bright: Any) -> None:
    import torch

    model = tiny.load(bright, device=workspace.main, dtype=torch.float32)
    with torch.autocast(torch.device(workspace.main).type, torch.float16):
        found, upstream = _features(model), _without(model)
    assert not upstream.isfinite().all()
    assert relative(found, _features(model)) < BOUND


def test_gradients_are_those_of_float32(workspace: Any, bright: Any) -> None:
    import torch

    found = []
    for dtype in (torch.float16, torch.float32):
        embedder = tiny.load(bright, device=workspace.main, dtype=dtype).model.embed_vision
        batch = tiny.unified_inputs(workspace.main)
        outputs = embedder(batch["pixel_values"], batch["image_position_ids"]).pooler_output
        outputs.float().square().mean().mul(2**14).backward()
        found.append(embedder.patch_dense.weight.grad.float())
    assert relative(*found) < BOUND


def test_split_over_devices_and_compiled_it_has_the_same_bits(workspace: Any, bright: Any) -> None:
    import torch

    model = tiny.load(bright, device=workspace.main, dtype=torch.float16)
    expected = _features(model)
    embedder, batch = model.model.embed_vision, tiny.unified_inputs(workspace.main)
    compiled = torch.compile(embedder, backend="eager", fullgraph=True)
    with torch.no_grad():
        traced = compiled(batch["pixel_values"], batch["image_position_ids"]).pooler_output
    assert torch.equal(traced.flatten(0, -2).float().cpu(), expected)
    whole = workspace.unified().outputs(model)
    split = workspace.unified().dispatch(model)
    assert torch.equal(_features(split), expected)
    found = workspace.unified().outputs(split)
    assert all(torch.equal(one, other) for one, other in zip(found.logits, whole.logits, strict=True))
    assert torch.equal(found.tokens, whole.tokens)
    assert all(logits.isfinite().all() for logits in whole.logits)
