"""F9: float32 pixel values, a quantized tower, and an embedder that is not quantized."""

from __future__ import annotations

from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._lab import tiny
from gemma4_compat.patches.multimodal.transformers_quantized_vision import BOUND
from gemma4_compat.patches.multimodal.transformers_vision_dtype import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"expected m(at)?1 and m(at)?2 to have the same dtype"


@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_the_recommended_modules_kept_in_bf16(workspace: Any, quantization: str) -> None:
    """What the README recommends, with what a processor gives, and what a careful user makes of that."""
    import torch

    from gemma4_compat._lab.scenarios import features, relative
    from gemma4_compat._lab.workspace import difference

    keep = list(gemma4_compat.quantization_skip_modules(str(workspace.checkpoint)))
    model = tiny.load(workspace.checkpoint, quantization, device=workspace.main, towers=True, skip_modules=keep)
    batch = workspace.inputs()
    assert batch["pixel_values"].dtype == torch.float32
    assert model.model.embed_vision.embedding_projection.weight.dtype == torch.bfloat16
    careful = dict(batch, pixel_values=batch["pixel_values"].bfloat16())
    assert relative(features(model, batch, "vision"), features(model, careful, "vision")) < BOUND
    found = workspace.outputs(model)
    model.model.embed_vision.embedding_projection.register_forward_pre_hook(
        lambda module, inputs: tuple(value.to(module.weight.dtype) for value in inputs)
    )
    assert difference(workspace.outputs(model), found) == 0.0


def test_autocast_casts_for_itself(workspace: Any) -> None:
    import torch

    model = tiny.load(workspace.checkpoint, device=workspace.main).float()
    batch, seen = workspace.inputs(), []
    model.model.embed_vision.register_forward_pre_hook(
        lambda module, inputs, kwargs: seen.append((*inputs, *kwargs.values())[0].dtype), with_kwargs=True
    )
    with torch.no_grad(), torch.autocast(torch.device(workspace.main).type, dtype=torch.bfloat16):
        reference = model(**batch).logits
        gemma4_compat.revert(PATCH.id)
        try:
            assert torch.equal(reference, model(**batch).logits)
        finally:
            gemma4_compat.install()
    assert len(seen) == 2
