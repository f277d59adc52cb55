"""The audio tower under autocast: float16 runs, and nothing else is touched."""

from __future__ import annotations

from typing import Any

import pytest

import gemma4_compat
from gemma4_compat._lab import tiny
from gemma4_compat._lab.scenarios import features
from gemma4_compat.patches.multimodal.transformers_audio_autocast import PATCH
from tests.patches.promise import Promise


class TestPromise(Promise):
    patch_id = PATCH.id
    original = "RuntimeError: value cannot be converted to type c10::Half without overflow"
    exact = False


@pytest.fixture(scope="module")
def model(workspace: Any) -> Any:
    import torch

    return tiny.load(workspace.checkpoint, device=workspace.main, dtype=torch.float32)


def test_outside_of_float16_autocast_not_a_bit_changes(workspace: Any, model: Any) -> None:
    import torch

    batch = tiny.inputs(workspace.main)
    half = tiny.load(workspace.checkpoint, device=workspace.main, dtype=torch.float16)

    def sound() -> list[Any]:
        found = [features(model, batch, "audio"), features(half, batch, "audio")]
        with torch.autocast(batch["input_ids"].device.type, dtype=torch.bfloat16):
            found.append(features(model, batch, "audio"))
        return found

    with_patch = sound()
    gemma4_compat.revert(PATCH.id)
    try:
        without = sound()
    finally:
        gemma4_compat.install()
    assert all(torch.equal(one, other) for one, other in zip(with_patch, without))


def test_a_padded_sound_is_the_sound(model: Any) -> None:
    """What is masked must be nothing under the softmax, as it is in float32."""
    import torch

    generator = torch.Generator().manual_seed(5)
    sound = torch.randn(1, 160, 128, generator=generator)
    noise = torch.cat([sound, 50 * torch.randn(1, 80, 128, generator=generator)], dim=1)
    device = next(model.parameters()).device

    def heard(values: Any) -> Any:
        mask = (torch.arange(values.shape[1]) < 160)[None].to(device)
        batch = {"input_features": values.to(device), "input_features_mask": mask}
        with torch.autocast(device.type, dtype=torch.float16):
            return features(model, batch, "audio")

    assert (heard(sound) - heard(noise)).abs().max() < 1e-2 * heard(sound).abs().max()


def test_training_as_a_trainer_does_with_fp16(workspace: Any) -> None:
    import torch

    batch = tiny.inputs(workspace.main)
    model = tiny.load(workspace.checkpoint, device=workspace.main, dtype=torch.float32).train()
    with torch.autocast(batch["input_ids"].device.type, dtype=torch.float16):
        loss = model(**batch, labels=batch["input_ids"]).loss
    loss.backward()
    found = [parameter.grad for name, parameter in model.model.audio_tower.named_parameters() if "q_proj" in name]
    assert all(gradient.isfinite().all() and gradient.abs().max() > 0 for gradient in found)


def test_a_quantized_tower(workspace: Any) -> None:
    import torch

    batch = tiny.inputs(workspace.main)
    model = tiny.load(workspace.checkpoint, "8bit", device=workspace.main, dtype=torch.float16, towers=True)
    expected = features(model, batch, "audio")
    with torch.autocast(batch["input_ids"].device.type, dtype=torch.float16):
        found = features(model, batch, "audio")
    assert ((found - expected).norm() / expected.norm()) < 0.05
