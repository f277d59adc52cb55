"""Sound in another dtype than the text it goes into."""

from __future__ import annotations

from typing import Any

import pytest

from gemma4_compat._lab import tiny
from gemma4_compat._lab.scenarios import relative
from gemma4_compat.patches.multimodal.transformers_audio_dtype import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = r"RuntimeError: masked_scatter_?: expected self and source to have same dtypes but got ?Float and"


def test_float16_towers_answer_as_float32_does(workspace: Any) -> None:
    import torch

    batch = tiny.inputs(workspace.main)
    model = tiny.load(workspace.checkpoint, device=workspace.main, dtype=torch.float32)
    with torch.no_grad():
        reference = model(**batch).logits
        for name in ("vision_tower", "embed_vision", "audio_tower", "embed_audio"):
            getattr(model.model, name).half()
        found = model(**batch).logits
    assert found.dtype == torch.float32
    # 0.005 here; without the sound the logits are 0.4 away.
    assert relative(found, reference) < 0.05


@pytest.mark.parametrize("quantization", [None, "4bit", "8bit"])
def test_a_model_of_one_dtype_is_left_alone(workspace: Any, quantization: str | None) -> None:
    import torch

    import gemma4_compat

    batch = tiny.inputs(workspace.main)
    model = tiny.load(workspace.checkpoint, quantization, device=workspace.main, dtype=torch.float16)

    def sound() -> Any:
        with torch.no_grad():
            return model.model.get_audio_features(
                batch["input_features"], batch["input_features_mask"], return_dict=True
            ).pooler_output

    with_patch = sound()
    gemma4_compat.revert(PATCH.id)
    try:
        without = sound()
    finally:
        gemma4_compat.install()
    assert with_patch.dtype == torch.float16
    assert torch.equal(with_patch, without)


def test_a_tuple_stays_one(workspace: Any) -> None:
    import torch

    batch = tiny.inputs(workspace.main)
    model = tiny.load(workspace.checkpoint, device=workspace.main)
    with torch.no_grad():
        found = model.model.get_audio_features(
            batch["input_features"], batch["input_features_mask"], return_dict=False
        )
    assert isinstance(found, tuple)


def test_training_under_autocast(workspace: Any) -> None:
    """As a trainer does with ``bf16=True``: weights of float32, the sound's gradient reaches its tower."""
    import torch

    batch = tiny.inputs(workspace.main)
    model = tiny.load(workspace.checkpoint, device=workspace.main, dtype=torch.float32).train()
    with torch.autocast(batch["input_ids"].device.type, dtype=torch.bfloat16):
        loss = model(**batch, labels=batch["input_ids"]).loss
    loss.backward()
    gradient = model.model.embed_audio.embedding_projection.weight.grad
    assert gradient.isfinite().all()
    assert gradient.abs().max() > 0
